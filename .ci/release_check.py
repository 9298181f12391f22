"""Build sdist and wheel, install them into clean environments, and use them: `make release-check`

It needs the package index, some gigabytes and some minutes. The last line says whether all is well.
"""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from email import message_from_string
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
SMOKE = """
import torch, acclimate
net = torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Linear(4, 3))
model = acclimate.EATA(net, source=torch.rand(64, 4), margin=None, epsilon=None)
model(torch.rand(8, 4)); assert model.last.updated; model.save("state"); model.load("state"); model.reset()
print("adapts with acclimate", acclimate.__version__, "and torch", torch.__version__)
"""


def run(*command: object, cwd: Path, code: int = 0) -> str:
    """Run a command, and stop if it does not exit as expected."""
    print("$", *(str(word) for word in command), flush=True)
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != code:
        sys.exit(f"exit code {done.returncode} instead of {code}:\n{done.stdout}\n{done.stderr}")
    return done.stdout + done.stderr


def environment(folder: Path, *packages: object) -> Path:
    """Make a virtual environment with packages; return its folder of programs."""
    venv.create(folder, with_pip=True)
    pip = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    run(*pip, "-c", ROOT / "constraints.txt", *packages, cwd=folder)
    return folder / "bin"


def build(folder: Path) -> tuple[Path, Path]:
    """Build both archives, and the wheel once more from the sdist; return sdist and wheel."""
    programs = environment(folder / "builder", "hatchling")
    run(programs / "python", "-m", "hatchling", "build", "-d", folder / "dist", cwd=ROOT)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    run(programs / "python", "-m", "hatchling", "build", "-t", "wheel", "-d", folder / "again", cwd=unpacked)
    (again,) = (folder / "again").glob("*.whl")
    files = [
        {name: zipfile.ZipFile(each).read(name) for name in zipfile.ZipFile(each).namelist()} for each in (wheel, again)
    ]
    if files[0] != files[1]:
        sys.exit("the wheel that the sdist makes is another one")
    look_into(wheel)
    print(f"{sdist.name}: {sdist.stat().st_size / 1e6:.1f} MB, {wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB")
    return sdist, wheel


def look_into(wheel: Path) -> None:
    """Check what the wheel has and says of itself."""
    archive = zipfile.ZipFile(wheel)
    names = archive.namelist()
    for name in ("acclimate/py.typed", "acclimate/paper/published.json", "acclimate/weights/digits_vit.safetensors"):
        assert name in names, f"the wheel has no {name}"
    (info,) = {name.partition("/")[0] for name in names if ".dist-info" in name}
    assert "acclimate = acclimate_start:main" in archive.read(f"{info}/entry_points.txt").decode()
    metadata = message_from_string(archive.read(f"{info}/METADATA").decode())
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert {"augment", "bench", "lightning", "transformers"} <= extras, extras
    assert {name.partition("/")[0] for name in names} == {"acclimate", "acclimate_start", info}


def main() -> None:
    """Check the library alone, from both archives, then with the benchmark, then its types."""
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        sdist, wheel = build(folder)
        for name, archive in (("from-sdist", sdist), ("alone", wheel)):
            alone = environment(folder / name, archive)
            print(run(alone / "python", "-c", SMOKE, cwd=folder), end="")
        print(run(alone / "acclimate", cwd=folder, code=1), end="")  # names the extra that it lacks
        whole = environment(folder / "whole", f"{wheel}[bench]", "mypy")
        print(run(whole / "acclimate", "doctor", cwd=folder), end="")
        run(whole / "acclimate", "list", cwd=folder)
        run(whole / "acclimate", "demo", "--images", 64, "--network", "resnet", "--method", "eata", cwd=folder)
        run(whole / "acclimate", "check", "eata", cwd=folder)
        run(whole / "mypy", "--strict", ROOT / "tests" / "typed_project", cwd=folder)
    print("all is well")


if __name__ == "__main__":
    main()
