"""The engine: whatever way a pass runs, the method does the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import A_TRAP, CASES, TABLE
from networks import images, make, stream
from torch import Tensor, nn

from acclimate import EATA, ETA, ETAC, SAR, Adapter, Engine, Reliable, Source, StochasticDepth, Tent
from acclimate.bench.own_networks import SmallViT
from acclimate.engine import Pass
from acclimate.engine.compiler import tolerance
from acclimate.parts.world import Share

LR = 1e-3
SHORT = {("tent", "bn"), ("eata", "ln"), ("sar", "gn"), ("eata-c", "seg"), ("cotta", "ln")}
"""Where batch sizes change too: another size is another compilation, which takes its time."""
AS_ETA = {("rdumb", "bn"), ("rdumb", "gn"), ("rdumb", "seg"), ("eata", "gn"), ("eata", "seg")}
"""What runs the passes of ETA, which is compiled for the same network, as its base class or its child."""
CHOOSY = ("sar", "eta-c", "eata-c")
"""Methods that leave out blocks: of one block there is nothing left."""
COMPILED = Engine(compiled=True)
RTOL = 1e-9
"""In double precision: of compiled against eager, and of any strategy against another that is exact."""


@pytest.fixture(autouse=True)
def _a_compiler_of_one_s_own() -> Iterator[None]:
    """torch.compile counts its recompilations by process, and its parts warn of their own deprecations."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        torch.compiler.reset()
        yield


@pytest.fixture
def without_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything but Inductor's C++: graphs are traced, split and gathered for as ever, and run as they are."""
    from functorch.compile import make_boxed_func

    from acclimate.engine import selective, tracing

    backend = partial(selective.inductor, inner=lambda graph, _, **__: make_boxed_func(graph.forward))
    monkeypatch.setattr(tracing, "BACKEND", backend)
    monkeypatch.setattr(selective, "compile_fx_inner", lambda graph, _, **__: make_boxed_func(graph.forward))


def batches() -> list[Tensor]:
    """A stream with a short batch in the middle and one at the end."""
    return [x.double() for x in [*stream(2), *stream(1, size=5, seed=900), *stream(1, seed=77), images(3, 5)]]


def shallow(family: str) -> nn.Module:
    """Return a network of one block, since a second takes as long to compile."""
    model = make(family)
    del model.blocks[1:]
    return model


def adapter_of(name: str, family: str, device: str = "cpu", **keywords: Any) -> Adapter:
    """In double precision, with a gentle pull: rounding must not grow."""
    case = CASES[name]
    model = make(family) if device != "cpu" or name in CHOOSY else shallow(family)
    arguments = dict(case.arguments())
    if "source" in arguments:
        arguments |= {"source": [x.double().to(device) for x in arguments["source"]], "beta": 1.0}
    if case.learns:
        keywords.setdefault("lr", LR)
    return case.method(model.double().to(device), **{**arguments, **keywords})


def agree(ours: Adapter, theirs: Adapter, xs: list[Tensor], rtol: float = RTOL) -> None:
    for x in xs:
        a, b = ours(x), theirs(x)
        torch.testing.assert_close(a, b, rtol=rtol, atol=rtol * float(b.abs().max()))
        ours_, theirs_ = ours.last, theirs.last
        for count in ("forwards", "backwards", "in_graph"):
            assert int(getattr(ours_, count)) == int(getattr(theirs_, count)), count
        assert ours_.updated == theirs_.updated
        assert ours_.terms.keys() == theirs_.terms.keys()
    for p, q in zip(ours.adapted, theirs.adapted, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=rtol)


# Compiled --------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(("name", "family"), [row for row in TABLE if row not in AS_ETA])
def test_compiled_passes_do_what_eager_ones_do(name: str, family: str) -> None:
    ours, theirs = adapter_of(name, family, engine=COMPILED), adapter_of(name, family)
    sizes = batches() if (name, family) in SHORT else batches()[:2]
    agree(ours, theirs, sizes, rtol=1e-6 if name == "tea" else RTOL)  # whose noise grows through its passes
    assert ours.runner.compiler.compiled_passes > 0, "nothing was compiled"
    assert ours.runner.compiler.eager_passes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "family"), [("tent", "bn"), ("eta", "ln"), ("eta", "gn"), ("eta-c", "bn"), ("dat", "seg")]
)
def test_passes_compiled_by_inductor_do_what_eager_ones_do(name: str, family: str) -> None:
    ours = adapter_of(name, family, engine=COMPILED)
    sizes = batches() if (name, family) in (("tent", "bn"), ("eta", "ln")) else batches()[:2]
    agree(ours, adapter_of(name, family), sizes)
    assert ours.runner.compiler.eager_passes == 0
    assert ours.runner.compiler.selective_passes == (name == "eta")


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("family", ["ln", "gn"])
def test_a_selective_backward_is_the_dense_one(family: str) -> None:
    """Zero, one, some and all rows, at two batch sizes."""
    adapter = ETA(shallow(family).double(), strategy="sparse", lr=LR)
    dense = ETA(shallow(family).double(), lr=LR)
    adapter(batches()[0])
    dense(batches()[0])
    for size in (8, 6):
        x = images(size, 3).double()
        for rows in (0, 1, 3, size - 1, size):
            keep = torch.zeros(size, dtype=torch.bool)
            keep[torch.randperm(size, generator=torch.Generator().manual_seed(rows))[:rows]] = True
            found = []
            for one in (adapter, dense):
                with one.learning():
                    kept = one.predict(x).kept(keep)
                    found.append(one.gradients(kept.mean(kept.logits.square().sum(1))))
            for a, b in zip(*found, strict=True):
                torch.testing.assert_close(a, b, rtol=RTOL, atol=1e-12)


@pytest.mark.usefixtures("without_code")
def test_a_selective_backward_through_padding() -> None:
    """Whose gradient is a cut; attention in bfloat16 pads its heads."""

    class Padded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.LayerNorm(12), nn.Linear(16, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(nn.functional.pad(self.norm(x.flatten(2).mean(1)[:, :12]), (0, 4)).relu())

    adapter = ETA(Padded(), strategy="sparse", engine=COMPILED, lr=LR)
    adapter(images(8, 1))
    assert adapter.runner.compiler.selective_passes == 1


@pytest.mark.usefixtures("without_code")
def test_a_selective_backward_runs_on_the_kept_rows_alone() -> None:
    adapter = ETA(make("ln"), strategy="sparse", select=Reliable(0.4), lr=LR)
    seen = []
    for x in stream(6):
        adapter(x)
        (backend,) = adapter.runner.compiler.backends()
        seen.append(int(adapter.last.backwards))
        assert backend.ran_on == max(seen[-1], 2)
    assert len(set(seen)) > 1


def kept_and_gradients(adapter: Adapter, x: Tensor, keep: Tensor) -> list[Tensor]:
    """Return the logits of the kept samples and the gradients of a loss on them."""
    adapter.generator.manual_seed(0)
    with adapter._aside(len(x)), adapter.learning():
        kept = adapter.predict(x).kept(keep, adapter.subnetworks() if isinstance(adapter, ETAC) else None)
        return [kept.logits[: int(keep.sum())].detach(), *adapter.gradients(kept.mean(kept.logits.square().sum(1)))]


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("method", [ETA, partial(ETAC, blocks="blocks.*", drop=0.5)])
def test_one_program_serves_any_number_of_kept_samples_on_batch_statistics(method: Any) -> None:
    ours, theirs = (method(make("bn").double(), strategy="replay-subset", engine=e) for e in (COMPILED, "eager"))
    x = images(6, 3).double()
    for count in range(1, 7):
        keep = torch.zeros(6, dtype=torch.bool)
        keep[torch.randperm(6, generator=torch.Generator().manual_seed(count))[:count]] = True
        found = [kept_and_gradients(adapter, x, keep) for adapter in (ours, theirs)]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=RTOL, atol=1e-11)
    assert (ours.runner.compiler.compiled_passes, ours.runner.compiler.eager_passes) == (2, 0)


@pytest.mark.slow
def test_a_padded_batch_compiled_by_inductor_is_the_exact_one() -> None:
    """Every number of samples, padded to an even number of rows."""
    ours, theirs = (ETA(shallow("bn").double(), strategy="replay-subset", engine=e) for e in (COMPILED, "eager"))
    x = images(16, 3).double()
    for count in range(1, 17):
        found = []
        for adapter, rows in ((ours, max(2, count + count % 2)), (theirs, count)):
            number = torch.tensor(count) if adapter is ours else None
            with adapter._aside(rows), adapter.learning():
                logits = adapter._run(Pass("batch", count=number), x[:rows], varying=True).logits[:count]
                found.append([logits.detach(), *adapter.gradients(logits.square().mean())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=RTOL, atol=1e-11)
    assert (ours.runner.compiler.compiled_passes, ours.runner.compiler.eager_passes) == (1, 0)


@A_TRAP
@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("family", ["bn", "seg"])
def test_detached_statistics_make_rows_independent(family: str) -> None:
    """BatchNorm by the batch's statistics, without gradients through them: sparse, masked and replay agree."""
    options = {"detach_statistics": True, "lr": LR}
    agree(
        ETA(shallow(family).double(), strategy="sparse", **options),
        ETA(shallow(family).double(), strategy="masked", **options),
        batches(),
    )
    detached = ETA(shallow(family).double(), strategy="masked", **options)
    replayed = ETA(shallow(family).double(), strategy="replay", lr=LR)
    for x in batches():
        torch.testing.assert_close(detached(x), replayed(x), rtol=RTOL, atol=1e-9)


@pytest.mark.usefixtures("without_code")
def test_sparse_with_batch_statistics_is_dense_and_warns() -> None:
    with pytest.warns(UserWarning, match="replay-subset"):
        ours = ETA(shallow("bn").double(), strategy="sparse", lr=LR)
    agree(ours, ETA(shallow("bn").double(), lr=LR), batches())


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("network", ["torchvision", "transformers", "timm", "own"])
def test_networks_of_other_libraries_can_be_sparse(network: str) -> None:
    """Their attention lays out rows in different ways."""
    torch.manual_seed(0)
    if network == "torchvision":
        import torchvision

        model = torchvision.models.VisionTransformer(32, 8, 1, 2, 16, 32, num_classes=10)
        nn.init.normal_(model.heads.head.weight)
    elif network == "transformers":
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10))
    elif network == "timm":
        import timm

        model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, depth=1)
    else:
        model = SmallViT(channels=3)
    xs = [torch.randn(6, 3, 32, 32, generator=torch.Generator().manual_seed(i)).double() for i in range(3)]
    ours, theirs = (ETA(copy.deepcopy(model).double(), margin=0.99, lr=LR, strategy=s) for s in ("sparse", "masked"))
    agree(ours, theirs, xs)
    assert ours.runner.compiler.selective_passes == 1


# Falling back ----------------------------------------------------------------------------------------


class AsksItsData(nn.Module):
    """What no tracer can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = shallow("ln")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x if float(x.mean()) > 0 else -x)


class FixesItsBatch(nn.Module):
    """len(x) makes a number of the batch size."""

    def __init__(self) -> None:
        super().__init__()
        self.net = shallow("ln")

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * torch.ones(len(x), 1, dtype=x.dtype)


@pytest.mark.usefixtures("without_code")
def test_what_cannot_be_compiled_runs_eagerly_with_one_warning() -> None:
    ours = ETA(AsksItsData(), engine="auto", lr=LR)
    with pytest.warns(UserWarning, match="AsksItsData") as told:
        agree(ours, ETA(AsksItsData(), lr=LR), stream(), rtol=1e-5)
    assert len(told) == 1


@pytest.mark.usefixtures("without_code")
def test_a_network_that_fixes_its_batch_size_is_compiled_for_each() -> None:
    ours = Tent(FixesItsBatch().double(), engine=COMPILED, lr=LR)
    agree(ours, Tent(FixesItsBatch().double(), lr=LR), batches())
    assert ours.runner.compiler.eager_passes == 0


@pytest.mark.usefixtures("without_code")
def test_a_wrong_gradient_is_found_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the gathering to take other rows, the dense backward would run instead."""
    from acclimate.engine import selective

    first = selective.rows_first
    monkeypatch.setattr(selective, "rows_first", lambda mask, count: first(~mask, count))
    ours = ETA(shallow("gn").double(), strategy="sparse", lr=LR)
    with pytest.warns(UserWarning, match="gradients of a selective backward differ") as warned:
        agree(ours, ETA(shallow("gn").double(), lr=LR), batches())
    assert warned[0].filename == __file__, "the line of the caller"
    assert ours.runner.compiler.selective_passes == 0


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(("allowed", "precision"), [(True, "tf32"), (False, "fp32")])
def test_convolutions_in_tf32_are_not_mistaken_for_an_error(
    allowed: bool, precision: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU torch lets convolutions use TF32 by default, whose rounding is above what single precision explains."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert tolerance(Engine(), cuda) == tolerance(Engine(precision=precision), cpu)
    assert tolerance(Engine(), cpu) == tolerance(Engine(precision="fp32"), cpu) < tolerance(Engine("tf32"), cpu)


@pytest.mark.usefixtures("without_code")
def test_a_poisoned_first_batch_is_refused_and_the_next_one_is_compiled() -> None:
    ours = ETA(shallow("gn"), strategy="sparse", lr=LR)
    with pytest.raises(ValueError, match="NaN or infinity in 8 of 8 images"):
        ours(torch.full((8, 3, 16, 16), torch.nan))
    ours(stream()[0])
    assert ours.runner.compiler.selective_passes == 1


# Choices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trap", [{"strategy": "replay"}, {"detach_statistics": True}])
def test_traps_on_batch_statistics_warn_once_when_the_adapter_is_built(trap: dict[str, Any]) -> None:
    for method, sound in ((ETA, "masked"), (partial(ETAC, blocks="blocks.*"), "replay-subset")):
        with pytest.warns(UserWarning, match=sound) as caught:
            adapter = method(make("bn"), **trap)
        assert len(caught) == 1
        adapter.double()(stream(1)[0].double())  # a second warning would be an error
        for family, more in (("ln", {}), ("bn", {"statistics": "source"})):
            method(make(family), **trap, **more)(stream(1)[0])
    Source(make("bn"))


def test_auto_chooses_for_the_network_and_the_method() -> None:
    assert EATA(make("ln"), beta=0, engine="auto").strategy == "sparse"
    assert EATA(make("bn"), beta=0, engine="auto").strategy == "masked"
    assert EATA(make("ln"), beta=0, engine="auto", strategy="replay").strategy == "replay"
    assert Tent(make("ln"), engine="auto").strategy == "masked"
    assert SAR(make("gn"), engine="auto").strategy == "sparse"
    assert Tent(make("bn"), engine="auto").engine == Engine("fp32", channels_last=True, compiled=True)
    assert Tent(make("ln"), engine="auto", precision="bf16").engine.precision == "bf16"
    assert Tent(make("ln")).engine == Engine()


def test_fastest_chooses_a_sound_strategy_and_only_when_asked() -> None:
    def chosen(method: Any, family: str, **options: Any) -> str:
        adapter = method(make(family), strategy="fastest", **options)
        assert f"strategy='{adapter.strategy}'" in repr(adapter)
        adapter.double()  # chooses again
        assert f"strategy='{adapter.strategy}'" in repr(adapter)
        return adapter.strategy

    for engine in ("eager", "auto"):
        assert chosen(ETA, "bn", engine=engine) == "replay-subset"
        assert chosen(partial(ETAC, blocks="blocks.*"), "bn", engine=engine) == "replay-subset"
        assert chosen(SAR, "bn", engine=engine) == "masked"
        assert chosen(Tent, "bn", engine=engine) == "masked"
        assert chosen(ETA, "ln", engine=engine) == ("sparse" if engine == "auto" else "masked")
        assert chosen(ETA, "bn", engine=engine, statistics="source") == chosen(ETA, "ln", engine=engine)
        assert ETA(make("bn"), engine=engine).strategy == "masked"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine": "fast"}, 'expected "eager", "recorded", "auto" or an acclimate.Engine'),
        ({"precision": "fp8"}, "precision='fp8': expected one of fp32, tf32, bf16"),
        ({"engine": Engine(graphs=True)}, "records CUDA graphs, and the model is on cpu"),
    ],
)
def test_invalid_engines_raise(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Tent(make("ln"), **options)


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16"])
@pytest.mark.parametrize("family", ["bn", "ln", "gn", "seg"])
def test_parameters_and_logits_stay_in_single_precision(family: str, precision: str) -> None:
    model = make(family)
    found = {name: (t.dtype, t.stride()) for name, t in model.state_dict().items()}
    adapter = Tent(model, engine=Engine(precision, channels_last=True), lr=LR)
    for x in stream():
        assert adapter(x).dtype == torch.float32
    assert {name: (t.dtype, t.stride()) for name, t in model.state_dict().items()} == found
    expected = Tent(make(family), lr=LR)
    for x in stream():
        expected(x)
    off = max(float((p - q).detach().abs().max()) for p, q in zip(adapter.adapted, expected.adapted, strict=True))
    assert off < (0.02 if precision == "bf16" else 1e-4)


@pytest.mark.parametrize("name", ["source", "bn-adapt", "tent", "sar", "memo"])
@pytest.mark.parametrize("family", ["bn", "gn"])
def test_norm_layers_that_do_not_adapt_run_in_bfloat16_too(name: str, family: str) -> None:
    """SAR leaves the last stage alone, MEMO and Source run on the source's statistics."""
    if (name, family) == ("bn-adapt", "gn"):
        return
    case = CASES[name]
    options = {"parameters": ["stem.1.weight"]} if name in ("tent", "sar") else {}
    ours, theirs = (case.make(make(family), precision=p, **options) for p in ("bf16", "fp32"))
    for x in stream(2):
        a, b = ours(x), theirs(x)
        assert float((a - b).norm() / b.norm()) < 0.1


def test_a_step_that_is_left_out_leaves_momentum_alone() -> None:
    """Fused SGD allots momentum without writing it; a first step that the condition leaves out must not keep that."""
    from acclimate.parts.optimizers import only_where

    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    for held in (False, True):
        parameter.grad = torch.full((3,), 2.0)
        with only_where(torch.tensor(held), optimizer):
            optimizer.step()
        expected = 2.0 if held else 0.0
        assert optimizer.state[parameter]["momentum_buffer"].tolist() == [expected] * 3
        assert optimizer.param_groups[0]["fused"] is None
    torch.testing.assert_close(parameter.detach(), torch.full((3,), 0.8))


def test_tf32_is_asked_for_inside_a_step_alone() -> None:
    seen = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make("ln")

        def forward(self, x: Tensor) -> Tensor:
            seen.append(torch.backends.cuda.matmul.fp32_precision)
            return self.net(x)

    before = torch.backends.cuda.matmul.fp32_precision
    Tent(Looks(), precision="tf32", lr=LR)(stream()[0])
    assert seen == ["tf32"]
    ETAC(Looks(), precision="tf32", blocks="net.blocks.*").opinions(stream()[0])
    assert {*seen} == {"tf32"}
    assert len(seen) == 3
    assert torch.backends.cuda.matmul.fp32_precision == before


def test_a_state_of_another_engine_loads_without_a_warning(tmp_path: Path) -> None:
    saved = Tent(make("ln"), precision="bf16", lr=LR)
    saved(stream()[0])
    saved.save(tmp_path / "state.safetensors")
    other = Tent(make("ln"), lr=LR)
    other.load(tmp_path / "state.safetensors")
    assert all(torch.equal(p, q) for p, q in zip(saved.adapted, other.adapted, strict=True))


def test_held_weights_follow_the_network() -> None:
    """bfloat16 copies are made again when the user loads other weights."""
    adapter = Source(make("ln"), precision="bf16")
    x = stream()[0]
    before = adapter(x)
    with torch.no_grad():
        adapter.model.head.weight.mul_(2)
        adapter.model.head.bias.mul_(2)
    torch.testing.assert_close(adapter(x), 2 * before, rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize(("name", "family"), [("eata", "ln"), ("eata-c", "bn"), ("tent", "gn")])
def test_a_deep_copy_of_a_compiled_adapter_is_independent(name: str, family: str) -> None:
    adapter = adapter_of(name, family, engine=COMPILED)
    adapter(batches()[0])
    other = copy.deepcopy(adapter)
    expected = adapter(batches()[1])
    torch.testing.assert_close(other(batches()[1]), expected, rtol=RTOL, atol=1e-9)
    assert other.runner is not adapter.runner


def test_the_import_brings_no_compiler() -> None:
    import subprocess
    import sys

    program = "import sys, torch, acclimate; sys.exit(any(m.startswith('torch._inductor') for m in sys.modules))"
    plain = "import sys, torch; sys.exit(any(m.startswith('torch._inductor') for m in sys.modules))"
    codes = [subprocess.run([sys.executable, "-c", p], check=False).returncode for p in (plain, program)]
    assert codes[0] == codes[1]


# What is changed after a pass was compiled or a step was recorded -------------------------------------

CHANGES = {
    "a selector": ("eata", lambda a: setattr(a, "select", Reliable(0.9))),
    "a selector's own setting": ("eata", lambda a: setattr(a.select.first, "margin", 0.9)),
    "a weight of the loss": ("eata-c", lambda a: setattr(a, "alpha", 3.0)),
    "the drop ratio": ("eata-c", lambda a: setattr(a, "drop", 0.7)),
    "the schedule": ("eata-c", lambda a: setattr(a, "schedule", "uniform")),
    "the direction of the divergence": ("eata-c", lambda a: setattr(a, "divergence", "reverse")),
    "BatchNorm's statistics": ("tent", lambda a: setattr(a, "statistics", "source")),
    "gradients through them": ("tent", lambda a: setattr(a, "detach_statistics", True)),
    "the prior": ("bn-adapt", lambda a: setattr(a, "prior", 1.0)),
    "the learning rate": ("tent", lambda a: a.optimizer.param_groups[0].update(lr=0.05)),
    "the engine": ("tent", lambda a: setattr(a, "engine", replace(a.engine, compiled=False, channels_last=True))),
}


@pytest.mark.usefixtures("without_code")
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_takes_effect_after_compilation(change: str) -> None:
    name, apply = CHANGES[change]
    ours, theirs = adapter_of(name, "bn", engine=COMPILED), adapter_of(name, "bn")
    xs = [x.double() for x in stream(6)]
    agree(ours, theirs, xs[:3])
    for adapter in (ours, theirs):
        apply(adapter)
    agree(ours, theirs, xs[3:])


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("compiled", [False, True])
def test_a_change_takes_effect_after_recording(change: str, compiled: bool) -> None:
    name, apply = CHANGES[change]
    recorded = Engine(compiled=compiled, graphs=True)
    ours, theirs = adapter_of(name, "bn", "cuda", engine=recorded), adapter_of(name, "bn", "cuda")
    xs = [x.double().cuda() for x in stream(12)]
    rtol = 1e-5 if name == "bn-adapt" else RTOL
    agree(ours, theirs, xs[:6], rtol)
    assert ours.recorder.steps == 1
    for adapter in (ours, theirs):
        apply(adapter)
    agree(ours, theirs, xs[6:], rtol)


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_part_of_what_a_recorded_step_depends_on(change: str) -> None:
    name, apply = CHANGES[change]
    adapter = adapter_of(name, "bn")
    x = stream(1)[0].double()
    adapter(x)
    before = [*adapter.recorder._settings()]
    adapter(x)
    adapter.predict_only(x)
    assert [*adapter.recorder._settings()] == before, "nothing was changed yet"
    apply(adapter)
    assert [*adapter.recorder._settings()] != before


def test_a_tensor_that_is_replaced_is_noticed_and_held() -> None:
    adapter = adapter_of("eata", "ln")
    adapter.select.first.threshold = torch.ones(2)
    before = [*adapter.recorder._settings()]
    assert [*adapter.recorder._settings()] == before
    adapter.select.first.threshold = torch.zeros(2)
    assert [*adapter.recorder._settings()] != before


def test_a_torch_that_the_engine_does_not_know_runs_eagerly_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts of torch.compile may have moved or changed."""
    import sys

    monkeypatch.setitem(sys.modules, "acclimate.engine.tracing", None)  # importing it raises
    monkeypatch.setattr(torch, "__version__", "9.1.0")
    ours = Tent(shallow("bn").double(), engine="auto", lr=LR)
    with pytest.warns(UserWarning, match=r"eagerly.*2\.11 and 2\.13; this is 9\.1\.0") as caught:
        agree(ours, Tent(shallow("bn").double(), lr=LR), batches())
    assert len(caught) == 1
    assert ours.runner.compiler.compiled_passes == 0


def test_equal_passes_share_code_and_others_do_not() -> None:
    depth = StochasticDepth(make("bn"), blocks="blocks.*")
    some, same, more = (depth.subnetworks(drop) for drop in (0.2, 0.2, 0.4))
    assert Pass("batch", some) == Pass("batch", same, parameters={"a": torch.ones(2)}, share=Share(0, 3, 3))
    assert hash(Pass("batch", some)) == hash(Pass("batch", same))
    different = [Pass("batch"), Pass("source"), Pass("detached"), Pass(0.5), Pass(0.25), Pass("batch", some)]
    different += [Pass("batch", more), Pass("batch", depth.subnetworks(0.2, schedule="uniform"))]
    assert len({*different}) == len(different)


# On the device ---------------------------------------------------------------------------------------


RECORDED = "source bn-adapt tent sar eta eata rdumb eta-c eata-c".split()  # noqa: SIM905
GRAPHED = [(name, family) for name, family in TABLE if name in RECORDED]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "family"), GRAPHED)
@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_steps_do_what_plain_ones_do(name: str, family: str, compiled: bool) -> None:
    """Changing batch sizes and kept counts; a record of the step that is its own."""
    xs = [x.cuda() for x in [*(y.double() for y in stream(7)), *batches()]]
    ours = adapter_of(name, family, "cuda", engine=Engine(compiled=compiled, graphs=True))
    loose = compiled and name == "bn-adapt"  # Triton has its constant, the weight of the batch, in single precision
    agree(ours, adapter_of(name, family, "cuda"), xs, rtol=1e-5 if loose else RTOL)
    assert ours.recorder.steps > 0
    assert not ours.recorder.off


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "family"), [(n, f) for n, f in GRAPHED if n not in ("source", "bn-adapt")])
@pytest.mark.parametrize("compiled", [False, True])
def test_learning_on_a_stream_of_its_own_changes_no_number(
    name: str, family: str, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)  # convolutions may add up in any order
    engines = [Engine(compiled=compiled, graphs=True, overlap=overlap) for overlap in (False, True)]
    plain, aside = (adapter_of(name, family, "cuda", engine=engine) for engine in engines)
    learned_aside = False
    for x in (x.double().cuda() for x in [*stream(7), *6 * stream(1, size=16)]):  # again and again, for equal counts
        logits = aside(x)
        assert torch.equal(logits.cpu(), plain(x).cpu())
        learned_aside |= aside.recorder._learns_on is not None
    assert learned_aside
    ours, theirs = aside.snapshot().tensors, plain.snapshot().tensors
    assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items())
    assert torch.equal(aside.last.logits, plain.last.logits)


@pytest.mark.gpu
def test_logits_can_be_read_before_learning_has_ended() -> None:
    net = nn.Sequential(*(nn.Sequential(nn.LayerNorm(2048), nn.Linear(2048, 2048)) for _ in range(40))).cuda()
    model, x = Tent(net, lr=1e-6, engine=Engine(graphs=True, overlap=True)), torch.rand(4096, 2048, device="cuda")
    for _ in range(5):
        model(x).cpu()
    assert not model.recorder._learns_on.query()
    model.settle()
    assert model.recorder._learns_on.query()


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bn", "ln"])
@pytest.mark.parametrize("reset", ["empty", "released"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_recorded_sar_starts_over_where_a_plain_one_does(family: str, reset: str, compiled: bool) -> None:
    """On these batches R is empty, R' is empty, and SAR starts over: see the tests of the recorder."""
    options = {"lr": 5e-3, "margin": 0.3, "rho": 0.3, "floor": 0.5, "reset": reset}
    recorded = Engine(compiled=compiled, graphs=True)
    ours, theirs = (adapter_of("sar", family, "cuda", engine=engine, **options) for engine in (recorded, "eager"))
    restarts = 0
    for x in stream(24, size=3):
        agree(ours, theirs, [x.double().cuda()])
        torch.testing.assert_close(ours.average, theirs.average, rtol=RTOL, atol=RTOL)
        before = theirs.state.source_parameters().values()
        if all(torch.equal(p, b) for p, b in zip(theirs.adapted, before, strict=True)):
            restarts += 1
            assert all(torch.equal(p, b) for p, b in zip(ours.adapted, before, strict=True))
    assert restarts > 0
    assert ours.recorder.steps == 1
    assert not ours.recorder.off


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["bn", "ln"])
@pytest.mark.parametrize("name", ["tea", "memo", "cotta"])
@pytest.mark.parametrize("compiled", [False, True])
def test_recorded_functions_do_what_eager_ones_do(name: str, family: str, compiled: bool) -> None:
    """Of steps that ask the host something in between; also after a reset, and with another learning rate."""
    more = {"threshold": 2.0} if name == "cotta" else {}  # it makes views of every batch
    xs = [x.cuda() for x in [*(y.double() for y in stream(5)), *batches()]]
    recorded = Engine(compiled=compiled, graphs=True)
    ours, theirs = (adapter_of(name, family, "cuda", engine=engine, **more) for engine in (recorded, "eager"))
    rtol = 1e-6 if name == "tea" else RTOL
    agree(ours, theirs, xs, rtol)
    for adapter in (ours, theirs):
        adapter.reset()
        adapter.optimizer.param_groups[0]["lr"] = 2 * LR
    agree(ours, theirs, xs[:4], rtol)
    assert ours.recorder.functions > 0
    assert not ours.recorder.off


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", [ETA, partial(ETAC, blocks="blocks.*", drop=0.5)])
def test_few_recorded_steps_serve_every_number_on_batch_statistics(method: Any, compiled: bool) -> None:
    xs = [x.double().cuda() for x in stream(40, size=64)]
    options = {"strategy": "replay-subset", "select": Reliable(0.7), "lr": LR}
    ours, theirs = (
        method(make("bn").double().cuda(), engine=engine, **options)
        for engine in (Engine(compiled=compiled, graphs=True), "eager")
    )
    agree(ours, theirs, xs)
    (step,) = ours.recorder.cache._entries.values()
    assert not ours.recorder.off
    assert 0 < len(step.seconds) <= 16
    assert all(rows % 4 == 0 for rows in step.seconds)


@pytest.mark.gpu
def test_an_episode_of_adam_is_recorded() -> None:
    xs = [x.double().cuda() for x in stream(5)]
    adam = {"lr": None, "optimizer": partial(torch.optim.AdamW, lr=LR)}
    ours, theirs = (adapter_of("memo", "ln", "cuda", engine=Engine(graphs=g), **adam) for g in (True, False))
    agree(ours, theirs, xs, rtol=1e-4)  # 1 − β₂ in single precision, as the device has it, is 1e-5 off
    assert ours.recorder.functions > 0


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "family"),
    [("eata", "ln"), ("eata", "bn"), ("eata-c", "ln"), ("tent", "gn"), ("sar", "bn"), ("sar", "ln")],
)
def test_a_recorded_step_that_keeps_nothing_changes_nothing(name: str, family: str) -> None:
    adapter = adapter_of(name, family, "cuda", engine="auto", precision="fp32")
    for x in stream(4):
        adapter(x.double().cuda())
    if name == "tent":
        return
    before = [p.detach().clone() for p in adapter.adapted]
    momentum = [s["momentum_buffer"].clone() for s in adapter.optimizer.state.values()]
    flat = torch.full((8, 3, 16, 16), 0.5, device="cuda", dtype=torch.float64)
    with torch.no_grad():
        list(adapter.model.parameters())[-1].zero_()
        list(adapter.model.parameters())[-2].zero_()  # every prediction uniform: nothing is reliable
    for _ in range(5):
        adapter(flat)
        assert not adapter.last.updated
        assert int(adapter.last.backwards) == 0
    assert adapter.recorder.steps > 0
    assert all(torch.equal(p, b) for p, b in zip(adapter.adapted, before, strict=True))
    after = [s["momentum_buffer"] for s in adapter.optimizer.state.values()]
    assert all(torch.equal(a, b) for a, b in zip(after, momentum, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "family"),
    [("tent", "bn"), ("eata", "bn"), ("eata", "ln"), ("eata-c", "bn"), ("sar", "bn"), ("sar", "ln")],
)
def test_a_recorded_step_rejects_nan_and_continues_unchanged(name: str, family: str) -> None:
    """Told at once where the host reads a count anyway; else with a later call, which no step waits for."""
    xs = [x.double().cuda() for x in stream(8)]
    ours = adapter_of(name, family, "cuda", engine=Engine(compiled=True, graphs=True))
    theirs = adapter_of(name, family, "cuda", engine=Engine(compiled=True, graphs=True))
    for x in xs[:4]:
        ours(x), theirs(x)
    bad = xs[4].clone()
    bad[2, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN or infinity"):  # noqa: PT012
        ours(bad)
        torch.cuda.synchronize()
        ours(xs[4])
    for x in xs[4:]:
        torch.testing.assert_close(ours(x), theirs(x), rtol=RTOL, atol=1e-9)  # cuDNN need not repeat itself
    assert ours.snapshot().tensors.keys() == theirs.snapshot().tensors.keys()
    for a, b in zip(ours.snapshot().tensors.values(), theirs.snapshot().tensors.values(), strict=True):
        assert a.shape == b.shape
    for p, q in zip(ours.adapted, theirs.adapted, strict=True):
        torch.testing.assert_close(p, q, rtol=RTOL, atol=1e-9)


@pytest.mark.gpu
def test_a_snapshot_raises_the_deferred_error() -> None:
    adapter = Tent(make("bn").cuda(), engine=Engine(graphs=True), lr=LR)
    for x in stream(4):
        adapter(x.cuda())
    adapter(torch.full((8, 3, 16, 16), torch.nan, device="cuda"))
    with pytest.raises(ValueError, match="images of an earlier batch"):
        adapter.snapshot()
    adapter.snapshot()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tent", "eata", "eata-c", "sar"])
@pytest.mark.parametrize("family", ["bn", "ln"])
def test_snapshots_and_resets_of_recorded_steps(name: str, family: str) -> None:
    xs = [x.double().cuda() for x in stream(8)]
    adapter = adapter_of(name, family, "cuda", engine=Engine(compiled=True, graphs=True))
    first = [adapter(x) for x in xs]
    snapshot = adapter.snapshot()
    later = [adapter(x) for x in xs]
    adapter.restore(snapshot)
    again = [adapter(x) for x in xs]
    adapter.reset()
    again = [*(adapter(x) for x in xs), *again]
    for a, b in zip([*first, *later], again, strict=True):  # not bitwise: cuDNN's backward need not repeat itself
        torch.testing.assert_close(a, b, rtol=RTOL, atol=1e-9)
    recorded = adapter.recorder.cache._entries.copy()
    adapter(xs[0])
    assert adapter.recorder.cache._entries == recorded, "a restore must not force another recording"


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", ["tent", "eata", "source", "sar"])
def test_a_masked_step_never_asks_the_device(name: str) -> None:
    adapter = adapter_of(name, "bn", "cuda", engine=Engine(graphs=True))
    xs = [x.double().cuda() for x in stream(8)]
    for x in xs[:4]:
        adapter(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in xs[4:]:
            adapter(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert adapter.recorder.steps == 1


@pytest.mark.gpu
def test_a_changed_learning_rate_is_noticed() -> None:
    xs = [x.double().cuda() for x in stream(10)]
    ours, theirs = (adapter_of("tent", "ln", "cuda", engine=Engine(graphs=g)) for g in (True, False))
    agree(ours, theirs, xs[:5])
    for adapter in (ours, theirs):
        adapter.optimizer.param_groups[0]["lr"] = 0.05
    agree(ours, theirs, xs[5:])


@pytest.mark.gpu
def test_an_optimizer_that_cannot_be_recorded_warns() -> None:
    adapter = Tent(make("ln").cuda(), engine=Engine(graphs=True), optimizer=partial(torch.optim.Adam, lr=LR))
    with pytest.warns(UserWarning, match="Adam cannot skip a step"):  # noqa: PT031
        for x in stream(4):
            adapter(x.cuda())


@pytest.mark.gpu
@pytest.mark.parametrize("network", ["digits_resnet", "digits_vit"])
@pytest.mark.parametrize("name", ["tent", "eata", "eata-c"])
def test_auto_in_bfloat16_stays_near_single_precision(name: str, network: str) -> None:
    """On trained networks: random ones are so sensitive that rounding alone changes what is selected."""
    from acclimate.bench import own_networks as models
    from acclimate.data.corruptions import corrupt
    from acclimate.data.digits import load_digits

    train, test = load_digits()
    xs = corrupt(test.x[:256], "gaussian_noise", 3, torch.Generator().manual_seed(0)).cuda().split(32)

    def run(**options: Any) -> Adapter:
        case = CASES[name]
        if "source" in case.arguments():
            options |= {"source": [train.x[:64].cuda()]}
        adapter = case.method(getattr(models, network)().cuda(), lr=LR, **options)
        logits.extend(adapter(x) for x in xs)
        return adapter

    logits: list[Tensor] = []
    auto = run(engine="auto")
    run()
    assert auto.engine.precision == "bf16"
    assert auto.recorder.steps == 1
    assert all(p.dtype == torch.float32 for p in auto.adapted)
    ours, theirs = torch.cat(logits[:8]), torch.cat(logits[8:])
    assert float((ours - theirs).norm() / theirs.norm()) < 0.02
    assert float((ours.argmax(1) == theirs.argmax(1)).float().mean()) > 0.96


@pytest.mark.parametrize(
    ("asked", "fits"),
    [("n < 16", True), ("n != 3", True), ("n == 13", False), ("n % 13 == 0", False), ("n * 2**27 < 2**31", False)],
)
def test_code_that_is_valid_for_some_numbers_of_rows_only_is_rejected(asked: str, fits: bool) -> None:
    """What a compiler asked of an example must be so for all, or make no difference to what comes out."""
    from torch._dynamo.source import ConstantSource
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    from acclimate.engine.selective import UnfitError, _holds_for_any

    context = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    mode = FakeTensorMode(shape_env=(env := ShapeEnv()))
    n = mode.from_tensor(torch.zeros(13), source=ConstantSource("rows"), symbolic_context=context).shape[0]
    symbol = n.node.expr
    bool(eval(asked))
    if fits:
        _holds_for_any(symbol, env, range(2, 65))
    else:
        with pytest.raises(UnfitError, match="compiled for"):
            _holds_for_any(symbol, env, range(2, 65))


def test_the_example_number_of_rows_equals_no_other_size() -> None:
    from acclimate.engine.selective import _unlike

    assert _unlike(3, [torch.zeros(8, 3, 22), torch.zeros(13)]) == 12
    assert _unlike(21, [torch.zeros(64, 197, 768)]) == 21


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_in_stages_is_batch_norm(training: bool, dtype: torch.dtype) -> None:
    from acclimate.engine.two_stage_norm import batch_norm

    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(5, 7, 6, 4, generator=generator, dtype=dtype) + 20).requires_grad_()
    weight, bias, mean, variance = torch.rand(4, 7, generator=generator, dtype=dtype).unbind()
    inputs = [x, weight.requires_grad_(), bias.requires_grad_()]
    ours = batch_norm(*inputs, mean, variance, training, 0.1, 1e-5, True)
    theirs = torch.nn.functional.batch_norm(x, mean.clone(), variance.clone(), *inputs[1:], training)
    gradient = torch.randn(ours.shape, generator=generator, dtype=dtype)
    tolerance = {"rtol": 1e-10, "atol": 1e-10} if dtype == torch.float64 else {"rtol": 1e-4, "atol": 1e-3}
    torch.testing.assert_close(ours, theirs, **tolerance)
    for a, b in zip(*(torch.autograd.grad(y, inputs, gradient) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b, **tolerance)


@pytest.mark.parametrize("correction", [0, 1])
def test_moments_in_stages_are_moments(correction: int) -> None:
    from acclimate.engine.two_stage_norm import var_mean

    x = 2 * torch.randn(5, 7, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 20
    expected = torch.var_mean(x, (0, 2, 3), correction=correction)
    torch.testing.assert_close(var_mean(x, [0, 2, 3], correction=correction), expected)


def test_a_plan_runs_on_the_engine(without_code: None, tmp_path: Path) -> None:
    from acclimate.bench.plan import Plan
    from acclimate.bench.run import Run

    few = {"images": 24, "batch_size": 16, "shifts": ("fog", "contrast"), "probe": "none"}
    plans = [Plan(methods=("eta",), engine=engine, **few) for engine in ("eager", "auto")]
    eager, auto = (Run(plan, tmp_path / plan.engine).do(next(plan.jobs())) for plan in plans)
    assert [d.accuracy for d in auto.domains] == [d.accuracy for d in eager.domains]
    assert auto.ece == pytest.approx(eager.ece, abs=1e-4)
    assert plans[0].protocol == plans[1].protocol, "an engine changes speed, not what is compared"
