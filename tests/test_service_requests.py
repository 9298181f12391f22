"""What a client may send: tensors by the Open Inference Protocol, and pictures. All else is refused in one sentence."""

from __future__ import annotations

import gzip
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fastapi.testclient import TestClient
from PIL import Image
from serving import application, as_file, assembled, binary, outputs, tensor

from acclimate.data.digits import load_digits
from acclimate.service.assembly import Service

MODEL = "/v2/models/digits-resnet"
DIGITS = load_digits()[1].x[:4].numpy()


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Service:
    return assembled(tmp_path_factory.mktemp("service"), body=1, pixels=1)


@pytest.fixture(scope="module")
def client(service: Service) -> Iterator[TestClient]:
    with application(service) as client:
        yield client


@pytest.fixture
def unchanged(service: Service) -> Iterator[None]:
    """Check that nothing is learned, and that no stream is made."""

    def state() -> Any:
        return service.worker.learner.snapshot(), service.worker.streams.keys()

    (before, cameras) = service.worker.ask(state).result()
    yield
    (after, now) = service.worker.ask(state).result()
    assert cameras == now
    assert all(torch.equal(tensor, after.tensors[name]) for name, tensor in before.tensors.items())
    assert before.tensors.keys() == after.tensors.keys()


def refused(response: Any, code: int) -> None:
    assert response.status_code == code, response.text
    content = response.json()
    assert content.keys() == {"error"}
    assert 0 < len(content["error"]) < 400
    assert not any(word in content["error"] for word in ("\n", "Traceback", "Error("))


def test_every_address_answers(client: TestClient) -> None:
    assert client.get("/v2").json()["extensions"] == ["binary_tensor_data"]
    for address in ("/v2/health/live", "/v2/health/ready", "/livez", "/readyz", f"{MODEL}/ready"):
        assert client.get(address).status_code == 200
    for address in ("/", "/livez", "/readyz", "/v2/health/live", "/v2/health/ready"):
        assert client.head(address).status_code == 200
    for address in (MODEL, f"{MODEL}/versions/1"):
        about = client.get(address).json()
        assert about["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [-1, 1, 32, 32]}]
        assert {"name": "probabilities", "datatype": "FP32", "shape": [-1, 10]} in about["outputs"]
    assert client.get(f"{MODEL}/versions/1/ready").status_code == 200
    for address in ("/v2/models/other", f"{MODEL}/versions/2", "/v2/models/other/ready", "/no"):
        refused(client.get(address), 404)
    refused(client.get(f"{MODEL}/infer"), 405)
    assert client.get("/openapi.json").status_code == 200


@pytest.mark.parametrize("kind", ["UINT8", "FP16", "FP32", "FP64"])
@pytest.mark.parametrize("sent", ["json", "binary"])
def test_datatypes(client: TestClient, kind: str, sent: str) -> None:
    x = (255 * DIGITS).round().astype(np.uint8)
    if kind != "UINT8":
        x = (x / 255).astype({"FP16": np.float16, "FP32": np.float32, "FP64": np.float64}[kind])
    address = f"{MODEL}/versions/1/infer?adapt=false"
    if sent == "binary":
        body, headers = binary(x, kind, id="seven")
        response = client.post(address, content=body, headers=headers)
        assert "Inference-Header-Content-Length" in response.headers
    else:
        response = client.post(address, json=tensor(x, kind, id="seven"))
        assert response.json()["id"] == "seven"
    found = outputs(response)
    exact = outputs(client.post(address, json=tensor(DIGITS)))
    assert found["probabilities"].shape == (4, 10)
    np.testing.assert_allclose(found["logits"], exact["logits"], atol=0.05)
    np.testing.assert_allclose(found["probabilities"].sum(1), 1, atol=1e-5)
    np.testing.assert_array_equal(found["label"], found["logits"].argmax(1))
    np.testing.assert_allclose(found["confidence"], found["probabilities"].max(1))
    p = found["probabilities"].astype(float)
    np.testing.assert_allclose(found["entropy"], -(p * np.log(p)).sum(1), atol=1e-4)
    assert (found["learned"] == 0).all()


def test_outputs_as_asked(client: TestClient) -> None:
    asked = [{"name": "label"}, {"name": "logits", "parameters": {"binary_data": True}}]
    response = client.post(f"{MODEL}/infer?adapt=0", json=tensor(DIGITS, outputs=asked))
    found = outputs(response)
    assert [*found] == ["label", "logits"]
    assert found["logits"].argmax(1).tolist() == found["label"].tolist()
    nested = tensor(DIGITS)
    nested["inputs"][0]["data"] = DIGITS.tolist()
    np.testing.assert_array_equal(
        outputs(client.post(f"{MODEL}/infer?adapt=0", json=nested))["logits"], found["logits"]
    )


def changed(**fields: Any) -> dict[str, Any]:
    content = tensor(DIGITS)
    content["inputs"][0] |= fields
    return content


NO_JSON = [b"", b"[]", b"{", b"\xff", b"NaN", b"[" * 100_000, b'{"inputs":' * 50_000, b'{"inputs": [1e999]}', b"null"]
WRONG: list[dict[str, Any]] = [
    {},
    {"inputs": 3},
    {"inputs": []},
    {"inputs": [None]},
    {"inputs": [*tensor(DIGITS)["inputs"]] * 2},
    changed(name="image"),
    changed(datatype="INT32"),
    changed(datatype=["FP32"]),
    changed(shape=[4, 1, 32]),
    changed(shape=[4, 3, 32, 32]),
    changed(shape=[4, 1, 32, 33]),
    changed(shape=[0, 1, 32, 32]),
    changed(shape=[-4, 1, -32, 32]),
    changed(shape=[True, 1, 32, 32]),
    changed(shape=[4.0, 1, 32, 32]),
    changed(shape=[int("9" * 4299), 1, 32, 32], parameters={"binary_data_size": 4}),
    changed(shape="4"),
    changed(data=None),
    changed(data=[0.5] * 5),
    changed(data=["0.5"] * 4096),
    changed(data=[None] * 4096),
    changed(data=[True] * 4096),
    changed(data=[1.5] * 4096),
    changed(data=[-0.5] * 4096),
    changed(data=[1e300] * 4096, datatype="FP16"),
    changed(data=[10**30] * 4096),
    changed(data=[256] * 4096, datatype="UINT8"),
    changed(data=[0.5] * 4096, datatype="UINT8"),
    changed(data=[[0.5] * 2048, [0.5] * 2047]),
    changed(data=np.moveaxis(DIGITS, 0, 3).tolist()),
    changed(parameters=[1]),
    changed(parameters={"binary_data_size": 4 * 4096}),
    changed(parameters={"binary_data_size": "many"}),
    changed(parameters={"binary_data_size": {}}),
    {**tensor(DIGITS), "id": 7},
    {**tensor(DIGITS), "outputs": [{"name": "depth"}]},
    {**tensor(DIGITS), "outputs": [{"name": []}]},
    {**tensor(DIGITS), "outputs": ["label"]},
    {**tensor(DIGITS), "outputs": {"name": "label"}},
    {**tensor(DIGITS), "parameters": {"adapt": "perhaps"}},
    {**tensor(DIGITS), "parameters": {"adapt": "\ud800"}},
    {**tensor(DIGITS), "parameters": {"stream": ""}},
    {**tensor(DIGITS), "parameters": {"stream": "a\nb"}},
    {**tensor(DIGITS), "parameters": {"stream": 3}},
    {**tensor(DIGITS), "parameters": {"stream": "\ud800"}},
]


@pytest.mark.usefixtures("unchanged")
def test_wrong_tensors_change_nothing(client: TestClient) -> None:
    for body in NO_JSON + [json.dumps(content).encode() for content in WRONG]:
        refused(client.post(f"{MODEL}/infer", content=body), 400)
    body, _ = binary(DIGITS)
    for length in ("", "-1", "1e3", "²", "9" * 5000, str(len(body) + 1), "10"):
        headers = {"Inference-Header-Content-Length": length.encode("latin-1")}
        refused(client.post(f"{MODEL}/infer", content=body, headers=headers), 400)  # type: ignore[arg-type]
    for x in (np.full_like(DIGITS, np.nan), np.full_like(DIGITS, np.inf), DIGITS * 255):
        body, headers = binary(x)
        refused(client.post(f"{MODEL}/infer", content=body, headers=headers), 400)
    for change in (b"", b"1234"):
        body, headers = binary(DIGITS)
        refused(client.post(f"{MODEL}/infer", content=(body + change)[: None if change else -1], headers=headers), 400)
    refused(client.post(f"{MODEL}/infer", content=b" " * 1_000_001), 413)
    refused(client.post(f"{MODEL}/infer", content=iter([b" " * 600_000] * 2)), 413)
    refused(client.post(f"{MODEL}/infer?stream=a%00b", json=tensor(DIGITS)), 400)
    zipped = gzip.compress(json.dumps(tensor(DIGITS)).encode())
    refused(client.post(f"{MODEL}/infer", content=zipped, headers={"Content-Encoding": "gzip"}), 415)
    both = {**tensor(DIGITS), "parameters": {"stream": "north"}}
    refused(client.post(f"{MODEL}/infer?stream=south", json=both), 400)
    refused(client.post("/v2/models/other/infer", json=tensor(DIGITS)), 404)
    many, headers = binary(np.zeros((257, 1, 32, 32), np.uint8), "UINT8")
    refused(client.post(f"{MODEL}/infer", content=many, headers=headers), 413)


@pytest.mark.usefixtures("unchanged")
@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "[", "[::1", "", "127.0.0.1@evil.example"])
def test_other_hosts_and_sites_are_refused(client: TestClient, host: str) -> None:
    refused(client.post(f"{MODEL}/infer", json=tensor(DIGITS), headers={"Host": host}), 403)
    for origin in (f"http://{host}", "null", "http://127.0.0.1:81", "http://["):
        refused(client.post(f"{MODEL}/infer", json=tensor(DIGITS), headers={"Origin": origin}), 403)
    own = {"Origin": "http://127.0.0.1"}
    assert client.post(f"{MODEL}/infer?adapt=false", json=tensor(DIGITS), headers=own).status_code == 200


def test_names_of_a_proxy_are_allowed(tmp_path: Path) -> None:
    infer = {"json": tensor(DIGITS)}
    for own in ("127.0.0.1", "0.0.0.0"):
        service = assembled(tmp_path / own, allow_host=["TTA.example.org"], host=own)
        with application(service) as client:
            for host, origin, code in (
                ("tta.example.org", "https://tta.example.org", 200),
                ("tta.example.org:8443", "https://tta.example.org:8443", 200),
                ("127.0.0.1:8000", "https://tta.example.org", 200),  # a proxy that sends a name of its own
                ("127.0.0.1", "http://127.0.0.1", 200),
                ("other.example.org", "https://tta.example.org", 403),
                ("tta.example.org", "https://evil.example", 403),
                ("tta.example.org", "http://127.0.0.1:3000", 403),
                ("tta.example.org.evil.example", "https://tta.example.org", 403),
            ):
                found = client.post(f"{MODEL}/infer?adapt=false", headers={"Host": host, "Origin": origin}, **infer)
                assert found.status_code == code, (own, host, origin)


# Pictures -------------------------------------------------------------------------------------------------------------


def seven() -> Image.Image:
    return Image.fromarray((255 * DIGITS[0, 0]).round().astype(np.uint8)).resize((64, 64))


def predict(client: TestClient, content: bytes, **query: str) -> Any:
    return client.post("/predict", content=content, params={"adapt": "false", **query})


def test_formats_and_modes_agree(client: TestClient) -> None:
    grey = seven()
    own = predict(client, as_file(grey)).json()["predictions"][0]
    assert own["class"] == own["top"][0]["class"] == int(own["label"])
    assert len(own["top"]) == 5
    assert own["learned"] is False
    sixteen = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    alpha = Image.merge("RGBA", [grey, grey, grey, Image.new("L", grey.size, 9)])
    files = {
        "rgb": as_file(grey.convert("RGB")),
        "alpha": as_file(alpha),
        "grey and alpha": as_file(alpha.convert("LA")),
        "16 bits": as_file(sixteen),
        "palette": as_file(grey.convert("P")),
        "webp": as_file(alpha, "WEBP", lossless=True),
        "jpeg": as_file(grey, "JPEG", quality=100),
        "cmyk": as_file(grey.convert("RGB").convert("CMYK"), "JPEG", quality=100),
        "with a preview": as_file(grey, "MPO", save_all=True, append_images=[grey.resize((8, 8))], quality=100),
    }
    for name, content in files.items():
        found = predict(client, content).json()["predictions"][0]
        assert found["class"] == own["class"], name
        assert found["confidence"] == pytest.approx(own["confidence"], abs=0.1), name
    turned = Image.Exif()
    turned[0x0112] = 6  # a quarter turn clockwise shows it upright
    content = as_file(grey.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=100, exif=turned)
    found = predict(client, content).json()["predictions"][0]
    assert found["confidence"] == pytest.approx(own["confidence"], abs=0.1)
    assert found["class"] == own["class"]


def test_several_files(client: TestClient) -> None:
    pictures = [Image.fromarray((255 * x[0]).round().astype(np.uint8)) for x in DIGITS]
    each = [predict(client, as_file(picture)).json()["predictions"][0] for picture in pictures]
    names = ["a.png", "b\ud800.png".encode("utf-8", "replace").decode(), "ä" * 300, "../../etc/passwd"]
    files = [("file", (name, as_file(picture))) for name, picture in zip(names, pictures, strict=True)]
    together = client.post("/predict?adapt=false", files=files).json()["predictions"]
    assert [found["class"] for found in together] == [found["class"] for found in each]
    for found, alone in zip(together, each, strict=True):
        assert found["confidence"] == pytest.approx(alone["confidence"], abs=1e-5)
    assert together[0]["name"] == "a.png"
    assert together[0]["disagreement"] == pytest.approx(0, abs=1e-5)
    some = client.post("/predict?adapt=false&disagreement=false", files=files[:1]).json()
    assert some["predictions"][0]["disagreement"] is None


def bomb(width: int, height: int) -> bytes:
    return as_file(Image.new("1", (width, height)))


@pytest.mark.usefixtures("unchanged")
def test_wrong_pictures_change_nothing(client: TestClient) -> None:
    whole, frames = as_file(seven().resize((200, 200)), "JPEG"), [seven(), seven().rotate(90)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = [
            (b"", 400),
            (b"no picture", 415),
            (as_file(seven(), "GIF"), 415),
            (as_file(seven(), "TIFF"), 415),
            (as_file(seven(), "BMP"), 415),
            (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415),
            (as_file(frames[0], "PNG", save_all=True, append_images=frames[1:]), 415),
            (as_file(frames[0], "WEBP", save_all=True, append_images=frames[1:]), 415),
            (whole[: len(whole) // 2], 400),
            (as_file(seven())[:-30], 400),
            (as_file(seven())[:200] + b"\0" * 20 + as_file(seven())[220:], 400),
            (bomb(1001, 1000), 413),
            (bomb(20_000, 20_000), 413),
            (bomb(1, 100_000), 413),
            (bomb(100_000, 1), 413),
            (as_file(Image.fromarray(np.random.default_rng(0).integers(0, 255, (999, 999, 3), np.uint8))), 413),
        ]
    for content, code in cases:
        refused(client.post("/predict", content=content), code)
        if content and len(content) < 1_000_000:
            files = [("file", ("fine.png", as_file(seven()))), ("file", ("x", content))]
            refused(client.post("/predict", files=files), code)


def test_refused_pictures_say_what_to_do(client: TestClient) -> None:
    assert "GIF" in predict(client, as_file(seven(), "GIF")).json()["error"]
    assert "again" in predict(client, as_file(seven(), "JPEG")[:-300]).json()["error"]


@pytest.mark.usefixtures("unchanged")
def test_wrong_forms_change_nothing(client: TestClient) -> None:
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    refused(client.post("/predict", content=b"", headers=form), 400)
    refused(client.post("/predict", content=b"--x\r\nno form", headers=form), 400)
    refused(client.post("/predict", content=b"x", headers={"Content-Type": "multipart/form-data"}), 400)
    refused(client.post("/predict", data={"file": "text"}, files={"other": ("", b"")}), 400)
    refused(client.post("/predict", files=[("file", as_file(seven()))] * 65), 400)
    half = b'--x\r\nContent-Disposition: form-data; name="file"; filename="+2AA-"\r\n\r\nno\r\n--x--\r\n'
    odd = {"Content-Type": "multipart/form-data; boundary=x; charset=utf-7"}
    refused(client.post("/predict", content=half, headers=odd), 415)
    refused(client.post("/predict?adapt=maybe", content=as_file(seven())), 400)
    refused(client.post(f"/predict?stream={'x' * 129}", content=as_file(seven())), 400)
