"""Control calls: the token, the audit log, snapshots, states of others, and a full disk."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from serving import CONTROL, TOKEN, X, application, ask, folder, same, started, state, tensor

from acclimate.service.assembly import Service

INFER = "/v2/models/digits-resnet/infer"
UNLIKE = 1 - X
"""Images unlike the training images, which a guarded network with BatchNorm therefore learns from."""
__all__ = ["folder"]


def audit(service: Service) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (service.store.folder / "audit.jsonl").read_text().splitlines()]


def test_control_needs_the_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = started(folder)
    calls = [("GET", "status"), ("GET", "snapshots"), ("POST", "load")]
    calls += [("POST", name) for name in ("snapshot", "rollback", "reset", "freeze", "unfreeze")]
    with application(service) as client:
        ask(service, X[:64])
        before = state(service)
        wrong = ("", TOKEN, f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer ", f"Bearer {TOKEN[:-1]}", "Bearer \xff")
        for header in wrong:
            for method, name in calls:
                found = client.request(
                    method, f"/control/{name}", headers={"Authorization": header.encode("latin-1")}, json={}
                )
                assert (found.status_code, found.headers["WWW-Authenticate"]) == (401, "Bearer"), header
        assert same(before, state(service))
        assert not service.worker.frozen
        assert {line["code"] for line in audit(service)} == {401}
        assert client.post("/control/snapshot", headers={"Authorization": f"bearer {TOKEN}"}).status_code == 200
        assert TOKEN not in (service.store.folder / "audit.jsonl").read_text()
    refused = [line for line in audit(service) if line["code"] == 401]
    assert len(refused) < len(wrong) * len(calls)  # callers without a token do not fill the disk
    assert sum(line.get("more", 1) for line in refused) == len(wrong) * len(calls)
    monkeypatch.delenv("ACCLIMATE_TOKEN")
    with application(started(folder / "off")) as client:
        assert client.post("/control/freeze", headers=CONTROL).status_code == 403


def post(client: TestClient, action: str, code: int = 200, **content: Any) -> dict[str, Any]:
    response = client.post(f"/control/{action}", json=content, headers=CONTROL)
    assert response.status_code == code, response.text
    return dict(response.json())


def test_control(folder: Path) -> None:
    service = started(folder, method="eata-c", guard=True, source_images=200, batch_size=32)
    with application(service) as client:
        post(client, "snapshot", 404, stream="none")
        ask(service, UNLIKE[:33])
        first = state(service)
        assert post(client, "snapshot", snapshot="first")["snapshot"] == "first"
        post(client, "snapshot", 409, snapshot="first")
        unnamed = post(client, "snapshot")["snapshot"]
        for name in ("../x", "/etc/x", ".x", "a/b", "", "x" * 65, "x\n", "a\0"):
            post(client, "snapshot", 400 if name else 200, snapshot=name or None)
        post(client, "rollback", 400, snapshot="../first")
        post(client, "rollback", 404, snapshot="none")
        post(client, "snapshot", 400, snapshot=3)
        post(client, "snapshot", 400, stream="a\nb")
        listed = client.get("/control/snapshots", headers=CONTROL).json()["snapshots"]
        assert [each["name"] for each in listed][:2] == ["first", unnamed]
        assert all(each["stream"] == "default" and each["bytes"] > 1000 for each in listed)

        ask(service, UNLIKE[33:97])
        assert not same(first, state(service))
        assert post(client, "rollback", snapshot="first")["done"] == "rollback"
        assert same(first, state(service))
        post(client, "rollback")
        status = client.get("/control/status", headers=CONTROL).json()
        assert (status["stream"], status["health"]["doing"], status["health"]["rollbacks"]) == ("default", "paused", 1)

        post(client, "freeze")
        frozen = state(service)
        assert ask(service, X[:40]).learned == [False] * 40
        assert same(frozen, state(service))
        post(client, "unfreeze")
        ask(service, UNLIKE[:40])
        assert not same(frozen, state(service))

        content = (service.store.snapshots / "first.safetensors").read_bytes()
        loaded = client.post("/control/load?stream=copy", content=content, headers=CONTROL)
        assert loaded.json() == {"done": "load", "stream": "copy", "restored": "upload"}
        assert same(first, state(service))
        post(client, "reset", stream="copy")
        assert service.worker.streams.keys() == ["default"]
        assert client.post("/control/erase", headers=CONTROL).status_code == 404
        done = [line["action"] for line in audit(service) if line["code"] == 200]
        told = ["snapshot", "snapshot", "snapshot", "snapshots", "rollback", "rollback", "status", "freeze", "unfreeze"]
        assert done == [*told, "load", "reset"]
        assert all(line["time"] and line["client"] for line in audit(service))


def test_every_call_is_in_the_audit_log(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = started(folder)
    foreign = {**CONTROL, "Origin": "http://evil.example"}
    with application(service) as client:
        assert client.post("/control/reset", headers=foreign).status_code == 403
        assert client.post("/control/reset", headers={**CONTROL, "Host": "evil.example"}).status_code == 403
        assert client.post("/control/erase%0A", headers=CONTROL).status_code == 404
        assert client.get("/control/erase", headers=CONTROL).status_code == 405
        assert client.put("/control/reset", headers=CONTROL).status_code == 405
        assert client.post("/control/erase").status_code == client.get("/control").status_code == 401
        assert [(line["action"], line["code"]) for line in audit(service)] == [
            *[("reset", 403), ("reset", 403), ("erase%0A", 404), ("erase", 405), ("reset", 405), ("erase", 401)],
            ("", 401),
        ]
        for _ in range(5):
            assert client.get("/control/snapshots", headers=CONTROL).status_code == 200
        monkeypatch.setattr(service.worker.streams, "reset", lambda _: 1 / 0)
        post(client, "reset", 500)
    *_, read, begun, failed, more = audit(service)
    assert (read["action"], read["code"], more["action"], more["more"]) == ("snapshots", 200, "snapshots", 4)
    assert (begun["code"], failed["code"], begun["id"]) == (None, 500, failed["id"])


def test_a_change_is_in_the_audit_log_before_it_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, found = started(folder), list[Any]()
    monkeypatch.setattr(service.worker.streams, "reset", lambda key: found.append((key, audit(service)[-1])))
    with application(service) as client:
        post(client, "reset", stream="north")
    ((key, line),) = found
    assert (line["action"], line["stream"], line["code"]) == ("reset", key, None)


def test_arguments_that_a_call_does_not_have_are_refused(folder: Path) -> None:
    service = started(folder, guard=True, source_images=200, batch_size=8)
    with application(service) as client:
        ask(service, X[:8])
        post(client, "snapshot", snapshot="d1")
        ask(service, X[8:16])
        before = state(service)
        for query, body, known in (
            ("rollback?snapshot=d1", {}, "stream"),
            ("rollback", {"name": "d1"}, "snapshot"),
            ("reset?camera=north", {}, "stream"),
            ("freeze?stream=default", {}, "all"),
            ("freeze", {"stream": "default"}, "all"),
            ("unfreeze", {"stream": "default"}, "all"),
            ("load?snapshot=d1", {}, "stream"),
        ):
            refused = client.post(f"/control/{query}", json=body, headers=CONTROL)
            assert (refused.status_code, known in refused.json()["error"]) == (400, True), query
        for query in ("status?camera=north", "snapshots?stream=default"):
            assert client.get(f"/control/{query}", headers=CONTROL).status_code == 400
        assert same(before, state(service))
        assert not service.worker.frozen


def test_streams_are_listed(folder: Path) -> None:
    service = started(folder, cameras=1)
    with application(service) as client:
        assert client.get("/control/streams").status_code == 401
        none = client.get("/control/streams", headers=CONTROL).json()
        assert none == {"streams": [], "current": None}
        assert client.get("/control/status", headers=CONTROL).status_code == 200
        for camera in ("south", "north"):
            ask(service, X[:1], camera)
        assert client.get("/control/streams", headers=CONTROL).json()["streams"] == ["north", "south"]
        assert client.get("/control/streams", headers=CONTROL).json()["current"] == "north"
        assert client.get("/control/status?stream=south", headers=CONTROL).json()["stream"] == "south"
        for stream in ("east", "default"):
            assert client.get(f"/control/status?stream={stream}", headers=CONTROL).status_code == 404


def test_a_state_may_be_larger_than_other_requests(folder: Path) -> None:
    service = started(folder, body=1, load_body=2, batch_size=256)
    headers, content = CONTROL, b"x" * 1_500_000
    with application(service) as client:
        ask(service, X[:255])  # these wait, and are part of the state
        post(client, "snapshot", snapshot="large")
        own = (service.store.snapshots / "large.safetensors").read_bytes()
        assert len(own) > 1_000_000
        assert client.post("/control/load?stream=copy", content=own, headers=headers).status_code == 200
        assert client.post("/control/load", content=2 * content, headers=headers).status_code == 413
        assert client.post("/control/reset", content=content, headers=headers).status_code == 413
        assert client.post("/control/load", content=content).status_code == 401


def test_a_rollback_says_what_it_restores(folder: Path) -> None:
    service = started(folder, guard=True, source_images=200, batch_size=32)
    with application(service) as client:
        for camera in ("north", "south"):
            ask(service, UNLIKE[:128], camera)
        post(client, "snapshot", stream="north", snapshot="d1")
        before = state(service)
        assert "north" in post(client, "rollback", 409, stream="south", snapshot="d1")["error"]
        assert same(before, state(service))
        named = post(client, "rollback", stream="north", snapshot="d1")
        assert (named["restored"], named["snapshot"]) == ("snapshot", "d1")
        back = [post(client, "rollback", stream="south")["restored"] for _ in range(5)]
        assert (back[0], back[-1]) == ("healthy", "source")
        (service.store.snapshots / "d1.json").unlink()  # then it is nobody's
        post(client, "rollback", stream="south", snapshot="d1")


@pytest.mark.parametrize("action", ["snapshot", "rollback", "reset"])
def test_an_action_is_for_the_camera_that_query_or_body_names(folder: Path, action: str) -> None:
    service = started(folder, guard=True, source_images=200, batch_size=8)
    headers = {"headers": CONTROL}
    with application(service) as client:
        for camera in ("default", "north"):
            ask(service, X[:8], camera)
        address = f"/control/{action}?stream=north"
        assert client.post(address, json={"stream": "default"}, **headers).status_code == 400
        assert service.worker.streams.keys() == ["default", "north"]
        assert client.post(f"/control/{action}?stream=", **headers).status_code == 400
        for body in ({}, {"json": {"stream": "north"}}):
            found = client.post(address, **body, **headers)
            assert (found.status_code, found.json()["stream"]) == (200, "north")
        rollbacks = client.get("/control/status", **headers).json()["health"]["rollbacks"]
        assert rollbacks == 0, "the camera of no name was rolled back"
        assert sorted(service.worker.streams.keys()) == ["default", "north"][: 1 if action == "reset" else 2]


def test_replicas_follow_each_other(folder: Path) -> None:
    """Two processes with one folder, here two workers."""
    here, there = (started(folder, batch_size=8, replicas=2) for _ in range(2))
    with application(here) as client:
        ask(there, X[:8], "north")
        there.worker.ask(there.worker.save).result()
        post(client, "freeze")
        assert ask(there, X[8:16], "north").learned == [False] * 8
        post(client, "unfreeze")
        assert ask(there, X[8:16], "north").learned == [True] * 8
        assert client.post("/control/load?stream=north", content=b"junk", headers=CONTROL).status_code == 409
        assert len([*here.store.cameras.glob("*.safetensors")]) == 1, "a refused state removes none"
        post(client, "snapshot", stream="north")
        there.worker.ask(lambda: there.worker.streams.release("north")).result()
        post(client, "reset", stream="north")
        assert not [*here.store.cameras.glob("*.safetensors")]


def test_states_of_others_are_refused(folder: Path) -> None:
    service = started(folder, guard=True, batch_size=32, source_images=200)
    others = {
        "network": started(folder / "a", model="digits-vit", guard=True, source_images=200),
        "method": started(folder / "b", method="eata", guard=True, source_images=200),
        "guard": started(folder / "c"),
    }
    ask(service, X[:33])
    before = state(service)
    with application(service) as client:
        for kind, other in others.items():
            ask(other, X[:3])
            other.worker.ask(other.worker.save).result()
            content = next(other.store.cameras.glob("*.safetensors")).read_bytes()
            for stream in ("default", "new"):
                answer = client.post(f"/control/load?stream={stream}", content=content, headers=CONTROL)
                assert answer.status_code == 409, kind
        for content in (b"", b"junk", next(service.store.folder.glob("*.jsonl")).read_bytes()):
            assert client.post("/control/load", content=content, headers=CONTROL).status_code == 409
        assert ask(service, X[:1], adapt=False).learned == [False]
        assert service.worker.streams.keys() == ["default"]
        assert same(before, state(service))


def test_what_a_restart_would_undo_is_not_answered_as_done(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = started(folder, guard=True, source_images=200, batch_size=8)
    with application(service) as client:
        ask(service, X[:8])
        post(client, "snapshot", snapshot="first")
        content = (service.store.snapshots / "first.safetensors").read_bytes()
        ask(service, X[8:16])
        with monkeypatch.context() as patch:
            patch.setattr(service.worker.streams, "save", full)
            post(client, "rollback", 507)
            post(client, "rollback", 507, snapshot="first")
            assert client.post("/control/load", content=content, headers=CONTROL).status_code == 507
        post(client, "rollback", snapshot="first")


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_stops_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = started(folder, batch_size=8, cameras=1)
    ask(service, X[:8])
    assert service.worker.ask(service.worker.save).result()
    whole = next(service.store.cameras.glob("*.safetensors")).read_bytes()

    with application(service) as client, monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        assert ask(service, X[8:16]).learned == [True] * 8
        assert not service.worker.ask(service.worker.save).result()
        for action in ("snapshot", "freeze"):
            assert client.post(f"/control/{action}", headers=CONTROL).status_code == 507
        assert not [*service.store.snapshots.iterdir()], "nothing is left of a snapshot that could not be written"
        assert not service.worker.frozen
        assert client.post(f"{INFER}?stream=other", json=tensor(X[:1].numpy())).status_code == 503
        assert client.post(INFER, json=tensor(X[:1].numpy())).status_code == 200
        assert next(service.store.cameras.glob("*.safetensors")).read_bytes() == whole
        assert service.worker.ready
    assert next(service.store.cameras.glob("*.safetensors")).read_bytes() != whole
