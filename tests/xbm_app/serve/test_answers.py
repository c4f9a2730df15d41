from starlette.testclient import TestClient

from xbm_app.serve import answers
from xbm_app.serve.app import create_app
from xbm_app.serve.run import access_to


def test_the_description_names_every_answer_and_every_refusal(searchers):
    client = TestClient(create_app(searchers, access_to("127.0.0.1", [], None)), base_url="http://localhost")
    description = client.get("/api/openapi.json").json()
    own = {name for name, kind in vars(answers).items() if isinstance(kind, type) and kind.__module__ == answers.__name__}
    assert own <= description["components"]["schemas"].keys() and len(own) > 8
    assert description["paths"].keys() == {
        "/api/health", "/api/about", "/api/labels", "/api/images", "/api/thumbnails/{run}/{image}", "/api/search",
    }  # fmt: skip
    for path, methods in description["paths"].items():
        for operation in methods.values():
            assert operation["description"], path
            refusals = {status: each for status, each in operation["responses"].items() if status != "200"}
            assert {"400", "401", "404", "413", "415", "422"} <= refusals.keys()
            for each in refusals.values():
                assert each["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/Error"}
