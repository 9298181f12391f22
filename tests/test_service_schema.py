"""The OpenAPI document: what schemathesis makes of it is answered with documented codes, and never with 500."""

from __future__ import annotations

import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from serving import CONTROL, TOKEN, application, assembled

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

CHECKS = (not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance)

HOST = {"Host": "127.0.0.1"}


@pytest.mark.filterwarnings("ignore")
def test_answers_are_documented(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCLIMATE_TOKEN", TOKEN)
    codes: Counter[int] = Counter()
    with application(assembled(tmp_path, body=1)) as client:
        schema = schemathesis.openapi.from_asgi("/openapi.json", client.app, headers=HOST)
        operations = [found.ok() for found in schema.get_all_operations()]
        assert {"/predict", "/control/{action}", "/v2/models/{name}/infer"} <= {each.path for each in operations}
        for operation in operations:

            @given(case=operation.as_strategy())
            @settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
            def check(case: Any) -> None:
                control = CONTROL if case.path.startswith("/control") else {}
                if "name" in (case.path_parameters or {}):
                    case.path_parameters["name"] = "digits-resnet"
                case.headers = {**(case.headers or {}), **HOST, **control}
                codes[case.call_and_validate(checks=CHECKS).status_code] += 1

            check()
    assert codes[200] > 0
    assert codes[400] > 0
