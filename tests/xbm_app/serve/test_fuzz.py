"""Whatever the API's own description allows, and much that it does not, is answered as described, and never by a failure."""

import io
import random
from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from PIL import Image
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance, status_code_conformance
from starlette.testclient import TestClient

from xbm_app.serve.access import access_to
from xbm_app.serve.server import Current, create_app
from xbm_app.serve.uploads import FORMATS

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]


@pytest.mark.parametrize("examples", [3, pytest.param(400, marks=pytest.mark.slow)])
def test_every_answer_is_one_that_the_description_names(comparing, examples):
    schema = schemathesis.openapi.from_url(f"{comparing}api/openapi.json")
    answers = Counter()
    for found in schema.get_all_operations():
        operation = found.ok()
        raw = schema.raw_schema["paths"][operation.path][operation.method]
        asks = "parameters" in raw or "requestBody" in raw
        for mode in [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if asks else [])]:

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
            def asked(case):
                response = case.call()
                case.validate_response(response, checks=CHECKS)
                answers[case.path, response.status_code] += 1

            asked()
    assert {path for path, _ in answers} == set(schema.raw_schema["paths"])
    assert {200, 404, 415, 422} <= {status for _, status in answers} and max(status for _, status in answers) < 500


@pytest.mark.parametrize("examples", [60, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_images_are_refused_or_read_but_never_fail(searchers, decoders, examples):
    client = TestClient(create_app(Current(searchers), access_to("127.0.0.1", [], None), decoders), base_url="http://localhost")
    draw, whole = random.Random(0), []
    for kind in FORMATS:
        file = io.BytesIO()
        Image.effect_noise((60, 50), 90).convert("RGB").save(file, kind)
        whole.append(file.getvalue())
    answers = Counter()
    for _ in range(examples):
        content = bytearray(draw.choice(whole))
        for _ in range(draw.choice([1, 2, 5, 20])):
            content[draw.randrange(min(len(content), draw.choice([40, 200, len(content)])))] = draw.randrange(256)
        if draw.random() < 0.2:
            content = content[: draw.randrange(len(content))]
        answers[client.post("/api/search", files={"image": ("a.jpg", bytes(content))}).status_code] += 1
    assert answers.keys() <= {200, 413, 415, 422} and answers[200] and answers[422]
