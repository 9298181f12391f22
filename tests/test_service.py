"""The service in this process: batches, streams, learning, metrics and the feed."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from dataclasses import fields
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from serving import (
    CONTROL,
    X,
    application,
    as_file,
    ask,
    coded,
    folder,
    held,
    outputs,
    same,
    started,
    state,
    tensor,
    white,
)

from acclimate import Tent
from acclimate.online.policy import Signals
from acclimate.service import feed as feed_module
from acclimate.service import model
from acclimate.service.assembly import Service
from acclimate.service.errors import Refusal
from acclimate.service.worker import Request

INFER = "/v2/models/digits-resnet/infer"
__all__ = ["folder"]


# Learning -------------------------------------------------------------------------------------------------------------


def test_learns_as_the_library_does(folder: Path) -> None:
    service, other = started(folder, batch_size=64), started(folder / "other", batch_size=64)
    adapter = other.served.adapter
    assert isinstance(adapter, Tent)
    for batch in X[:128].split(64):
        found = ask(service, batch)
        assert torch.equal(found.logits, adapter(batch))
        assert found.learned == [True] * 64  # Tent keeps all
    assert ask(service, X[:1]).learned == [None]
    assert ask(service, X[:130], adapt=False).learned == [False] * 130
    mixed = ask(service, X[:130], "new").learned
    assert mixed == [True] * 128 + [None] * 2


def test_flags_follow_the_selection(folder: Path) -> None:
    service = started(folder, method="eata", source_images=128, batch_size=64, overrides={"eata": {"margin": 0.3}})
    x = torch.cat([X[:48], torch.rand(16, 1, 32, 32, generator=torch.Generator().manual_seed(0))])
    found = ask(service, x)
    kept = service.served.adapter.last.kept
    assert found.learned == kept.tolist()
    assert 0 < sum(map(bool, found.learned)) < 64


def test_streams_have_their_own_state(folder: Path) -> None:
    service, alone = started(folder, batch_size=32, cameras=1), started(folder / "alone", batch_size=32)
    batches = (1 - X[:96]).split(32)
    for batch in batches:
        ask(service, batch, "north")
        ask(service, X[:32], "south")
    own = [ask(alone, batch, "any").logits for batch in batches]
    assert torch.equal(ask(service, X[:32], "north", adapt=False).logits, ask(alone, X[:32], "any", adapt=False).logits)
    new = ask(service, X[:32], "new", adapt=False).logits
    assert not torch.equal(new, ask(service, X[:32], "south", adapt=False).logits)
    assert not torch.equal(own[0], own[1])
    assert sorted(service.worker.streams.keys()) == ["north", "south"]


def test_without_adapting_nothing_changes(folder: Path) -> None:
    service = started(folder, batch_size=32, guard=True, source_images=200, method="eata-c")
    ask(service, X[:40])
    before = state(service)
    for size in (1, 32, 50):
        ask(service, X[:size], adapt=False)
        ask(service, X[:size], adapt=False, compare=True)
        ask(service, X[:size], "unknown", adapt=False)
    assert service.worker.streams.keys() == ["default"]
    ask(service, X[:1], adapt=False)
    assert same(before, state(service))
    ask(service, X[:1])
    assert not same(before, state(service))


@pytest.mark.parametrize(("given", "learned_from", "held_out"), [(100, 100, 0), (128, 96, 32)])
def test_few_source_images_all_go_to_the_method(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    given: int,
    learned_from: int,
    held_out: int,
) -> None:
    used, build = list[int](), model._adapter
    monkeypatch.setattr(model, "_adapter", lambda *how: used.append(len(how[2])) or build(*how))
    guard = started(folder, method="eata", guard=True, source_images=given).worker.guard
    assert guard is not None
    assert (used, 0 if guard.probe is None else len(guard.probe.images)) == ([learned_from], held_out)
    assert ["128" in record.getMessage() for record in caplog.records] == [True] * (not held_out)


# Batches --------------------------------------------------------------------------------------------------------------


class Seen:
    """Notes the sizes of batches."""

    def __init__(self, service: Service) -> None:
        self.batches: list[tuple[str, int]] = []
        service.worker.watch = lambda batch: self.batches.append((batch.stream, len(batch.x)))


def test_batches_have_a_size_and_a_time(folder: Path) -> None:
    service = started(folder, batch_size=16, wait=1_000_000)
    seen = Seen(service)
    futures = [service.worker.submit(Request(x)) for x in X[:32].split(1)]
    answers = [future.result(timeout=60) for future in futures]  # full batches do not wait
    service.worker.ask(lambda: None).result()
    assert seen.batches == [("default", 16)] * 2
    each = started(folder / "each", batch_size=16)
    assert torch.equal(answers[3].logits[0], ask(each, X[:16]).logits[3])

    service = started(folder / "wait", batch_size=16, wait=300)
    seen, start = Seen(service), time.monotonic()
    ask(service, X[:3])
    assert time.monotonic() - start > 0.25
    assert seen.batches == [("default", 3)]


def test_batches_are_of_one_kind_and_in_order(folder: Path) -> None:
    service = started(folder, batch_size=16)
    seen, done = Seen(service), []
    go = held(service.worker)
    requests = [Request(X[:5], "a"), Request(X[:5], "b"), Request(X[:5], "a"), Request(X[:5], "a", adapt=False)]
    futures = [service.worker.submit(request) for request in requests]
    control = service.worker.ask(lambda: done.append([*seen.batches]))
    last = service.worker.submit(Request(X[:5], "a"))
    go.set()
    for future in (*futures, control, last):
        future.result(timeout=30)
    assert seen.batches == [("a", 10), ("b", 5), ("a", 5), ("a", 5)]
    assert done == [[("a", 10), ("b", 5), ("a", 5)]]  # neither before nor after its turn


def test_a_full_queue_refuses(folder: Path) -> None:
    service = started(folder, batch_size=4, queue=8)
    with application(service) as client:
        go = held(service.worker)
        waiting = [service.worker.submit(Request(X[:1])) for _ in range(8)]
        refused = client.post(INFER, json=tensor(X[:1].numpy()))
        assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert client.get("/livez").status_code == client.get("/metrics").status_code == 200
        assert service.worker.depth == 8
        go.set()
        assert all(future.result(timeout=30).logits.shape == (1, 10) for future in waiting)
        assert client.post(INFER, json=tensor(X[:1].numpy())).status_code == 200
    with pytest.raises(Refusal):
        service.worker.submit(Request(X[:1]))


def test_each_answer_belongs_to_its_image(folder: Path) -> None:
    service = started(folder, model=f"{folder}/net.py:coded", batch_size=8, wait=1)
    wrong: list[int] = []

    def work(first: int) -> None:
        for number in range(first, first + 40):
            images = np.stack([coded(100 * number + i) for i in range(number % 5 + 1)])
            how = {"stream": str(number % 3), "adapt": number % 4 > 0}
            x = torch.from_numpy(images).float() / 255
            for image, logits in zip(images, ask(service, x, **how).logits, strict=True):
                if white(image) != {*(logits > 0).nonzero().flatten().tolist()}:
                    wrong.append(number)

    threads = [threading.Thread(target=work, args=(1000 * n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_sizes_that_do_not_fit_are_refused(folder: Path) -> None:
    service = started(folder, model=f"{folder}/net.py:coded", batch_size=8)
    address = "/v2/models/net.py-coded/infer"
    with application(service) as client:
        ok = client.post(address, json=tensor(coded(1)[None], "UINT8"))
        assert white(coded(1)) == {*np.flatnonzero(outputs(ok)["logits"][0] > 0).tolist()}
        for side in (12, 2):  # another size than the stream's, and one that the network cannot take
            stream = "default" if side == 12 else "new"
            answer = client.post(f"{address}?stream={stream}", json=tensor(np.zeros((1, 1, side, side)), "UINT8"))
            assert answer.status_code == 400
        assert client.post("/predict", content=as_file(coded(3))).status_code == 200


def test_the_worker_survives_what_watches_it(folder: Path) -> None:
    service = started(folder)
    service.worker.watch = lambda _: 1 / 0
    ask(service, X[:1])
    ask(service, X[:1])
    assert service.worker.ready


def test_a_dead_worker_is_told(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = started(folder)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with application(service) as client:
        go = held(service.worker)
        monkeypatch.setattr(service.worker, "_answer", lambda _: (_ for _ in ()).throw(SystemExit))
        first = service.worker.submit(Request(X[:1]))
        control = service.worker.ask(lambda: 1)
        go.set()
        with pytest.raises(Refusal):
            control.result(timeout=30)
        assert not first.done()
        assert client.get("/livez").status_code == client.get("/readyz").status_code == 503
        assert client.post(INFER, json=tensor(X[:1].numpy())).status_code == 503
        first.set_exception(SystemExit())


# What is seen ---------------------------------------------------------------------------------------------------------


def test_metrics(folder: Path) -> None:
    service = started(folder, method="eata-c", guard=True, source_images=200, batch_size=32)
    with application(service) as client:
        client.post(INFER, json=tensor(X[:64].numpy()))
        client.post(f"{INFER}?adapt=false", json=tensor(X[:7].numpy()))
        client.post(INFER, json=tensor(X[:3].numpy()))
        client.post(INFER, content=b"")
        client.post("/control/rollback", headers=CONTROL)
        text = client.get("/metrics").text
    assert service.worker.guard is not None
    alarms = {line.split('"')[1]: float(line.split()[1]) for line in text.splitlines() if "alarms_total{" in line}
    assert alarms == {policy.signal: 0 for policy in service.worker.guard.policies}  # so that the first is an increase
    found = {s.name: s for family in text_string_to_metric_families(text) for s in family.samples}
    assert {family.name for family in text_string_to_metric_families(text)} >= {
        *("acclimate_requests", "acclimate_request_duration_seconds", "acclimate_queue_depth", "acclimate_samples"),
        *("acclimate_entropy_nats", "acclimate_state_distance", "acclimate_state_age_seconds", "acclimate_alarms"),
        *("acclimate_rollbacks", "acclimate_probe_disagreement_ratio"),
    }
    codes = {line.split('"')[1]: float(line.split()[1]) for line in text.splitlines() if "requests_total{" in line}
    assert codes == {"200": 4, "400": 1}
    kept = {line.split('"')[1]: float(line.split()[1]) for line in text.splitlines() if "samples_total{" in line}
    assert found["acclimate_entropy_nats_count"].value == 74
    assert sum(kept.values()) == 64  # three still wait, and seven were only to be predicted
    assert found["acclimate_rollbacks_total"].value == 1
    assert found["acclimate_queue_depth"].value == 0


def test_images_that_are_only_predicted_do_not_count_as_rejected(folder: Path) -> None:
    service = started(folder, batch_size=8)
    ask(service, X[:8])
    ask(service, X[:8], adapt=False)
    assert service.feed.status(service.worker)["kept_share"] == 1
    service.worker.frozen = True
    ask(service, X[:8])
    assert service.feed.status(service.worker)["kept_share"] == 0


def predictions(service: Service) -> list[dict[int, bool | None]]:
    """Publish to a list: of each event, whether an image was learned from, by id."""
    sent: list[dict[int, bool | None]] = []

    def publish(event: str, content: Any) -> None:
        if event == "predictions":
            assert all(each["thumbnail"] for each in content)
            sent.append({each["id"]: each["learned"] for each in content})

    service.feed.publish = publish  # type: ignore[method-assign]
    return sent


def test_the_page_learns_what_became_of_images_that_waited(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_module, "_SHOWN", 1000)
    service = started(folder, method="eata", source_images=128, batch_size=4, overrides={"eata": {"margin": 0.3}})
    service.feed._budget = 1000.0
    sent, noise = predictions(service), torch.rand(3, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    ask(service, torch.cat([X[:1], noise[:1]]), "north")
    ask(service, X[:3], "south")
    ask(service, X[:1], "north", adapt=False)
    assert sent == [{0: None, 1: None}, {2: None, 3: None, 4: None}, {5: False}]
    ask(service, torch.cat([noise[1:], X[1:2]]), "north")  # four of the five are a batch
    kept = service.served.adapter.last.kept
    assert sent[3] == {**dict(zip((0, 1, 6, 7), kept.tolist(), strict=True)), 8: None}
    assert 0 < int(kept.sum()) < 4
    ask(service, X[4:11], "south")
    assert sent[4].keys() == {*range(2, 5), *range(9, 16)}
    waiting = [number for number, learned in sent[4].items() if learned is None]
    assert waiting == [14, 15]
    assert {each["id"]: each["learned"] for each in service.feed._predictions} == {
        number: learned for event in sent for number, learned in event.items()
    }


def test_images_of_a_restored_state_are_not_mistaken_for_others(folder: Path) -> None:
    service = started(folder, batch_size=4)
    sent = predictions(service)
    with application(service) as client:
        ask(service, X[:1])
        client.post("/control/snapshot", json={"snapshot": "one"}, headers=CONTROL)
        ask(service, X[:4])
        client.post("/control/rollback", json={"snapshot": "one"}, headers=CONTROL)
        ask(service, X[:3])
    assert sent[-1] == {5: True, 6: True, 7: True}  # nobody knows what the image of the snapshot was called
    before = started(folder / "a", batch_size=4)
    ask(before, X[:2])
    before.worker.close()
    after = started(folder / "a", batch_size=4)
    sent = predictions(after)
    ask(after, X[:3])
    assert sent == [{0: True, 1: True, 2: None}]


def test_the_page_has_words_for_every_signal() -> None:
    words = files("acclimate.service").joinpath("page", "words.js").read_text()
    table = re.search(r"const SIGNALS = \{(.*?)\n\};", words, re.DOTALL)
    assert table is not None
    known = {*re.findall(r"^  (\w+): ", table[1], re.MULTILINE)}
    assert {each.name for each in fields(Signals)} - {"batch"} <= known


def test_viewers_are_limited_and_stalled_ones_cost_little(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = started(folder)
    monkeypatch.setattr(feed_module, "_VIEWERS", 2)

    async def look() -> None:
        feed = service.feed
        feed._loop = asyncio.get_running_loop()
        stalled, other = feed.events(), feed.events()
        assert (await anext(stalled)).startswith("event: hello\n")
        assert (await anext(other)).startswith("event: hello\n")
        with pytest.raises(Refusal):
            await anext(feed.events())
        assert (await anext(other)).startswith("event: history\n")
        for number in range(500):
            feed.publish("status", {"number": number})
        await asyncio.sleep(0.01)
        assert max(queue.qsize() for queue in feed._viewers) <= 64
        assert json.loads((await anext(other)).partition("data: ")[2])["number"] == 500 - 64  # the latest are kept
        await stalled.aclose()
        assert (await anext(feed.events())).startswith("event: hello\n")
        feed.end()
        await asyncio.sleep(0.01)
        assert len([event async for event in other]) == 63

    asyncio.run(look())


def test_the_feed_shows_some_of_many(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("acclimate.service.feed.time.monotonic", lambda: 1e6)  # all in the same second
    service = started(folder, batch_size=64)
    for batch in X.split(64):
        ask(service, batch)
    status = service.feed.status(service.worker)
    assert (status["images"], status["batches"], sum(status["confidences"])) == (256, 4, 256)
    shown = [*service.feed._predictions]
    assert len(shown) == 10
    assert all(each["thumbnail"].startswith("data:image/png;base64,") for each in shown)
    json.dumps(status, allow_nan=False)
