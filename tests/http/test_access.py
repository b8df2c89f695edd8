"""Nobody gets in who is not let in."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, Depends, FastAPI
from fastapi.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from celery_durable.http import (
    Access,
    Authorize,
    Forbidden,
    NoAuthorization,
    Permission,
    Unauthenticated,
    asgi,
    router,
)
from celery_durable.http.access import AccessControl, make_guarded_route
from tests.http.asgi import send
from tests.http.conftest import Shop
from tests.http.test_routes import refused
from tests.support.embedded import until


def with_key(access: Access) -> bool:
    if access.request.headers.get("X-Api-Key") != "sesame":
        raise Unauthenticated("Send the header X-Api-Key.", challenge="ApiKey")
    return True


def routes(api: TestClient) -> list[tuple[str, str]]:
    """Every method and path, from the routing table itself."""
    found = []
    for route in _leaves(api.app.routes):
        path = re.sub(r"\{\w+(:path)?\}", "o-1", route.path)
        found += [(method, path) for method in sorted(route.methods)]
    return found


def _leaves(these: Any) -> list[Any]:
    leaves = []
    for route in these:
        inner = getattr(route, "original_router", None)  # how newer FastAPIs keep an included router
        leaves += _leaves(inner.routes) if inner is not None else [route]
    return leaves


# --- deny by default ----------------------------------------------------------------------------


def test_there_is_no_api_without_hooks_or_a_clear_word(shop: Shop) -> None:
    for make in (asgi, router):
        for nothing in ({}, {"authorize": None}, {"authorize": Authorize()}, {"authorize": Authorize(), "tick": True}):
            with pytest.raises(NoAuthorization, match="The HTTP API has no authorize= hook"):
                make(shop.durable, **nothing)
        with pytest.raises(NoAuthorization, match="Both authorize= and allow_anonymous=True were given"):
            make(shop.durable, authorize=with_key, allow_anonymous=True)


def test_every_route_denies_without_credentials(shop: Shop, order: str) -> None:
    api = shop.client(authorize=with_key, tick=True)
    mounted = FastAPI(openapi_url=None)
    mounted.include_router(router(shop.durable, authorize=with_key, tick=True))
    table = routes(api)
    assert len(table) == len(routes(TestClient(mounted))) + 1 == 34  # also the description
    before = api.get(order, headers={"X-Api-Key": "sesame"}).json()
    for method, path in table:
        for headers in ({}, {"X-Api-Key": "sesam"}):
            for body in ({}, {"json": {"id": "e-1", "type": "approval"}}, {"content": b"\xff{"}):
                answer = api.request(
                    method, path.replace("/workflows/o-1", "/workflows/order"), headers=headers, **body
                )
                assert refused(answer, 401, "UNAUTHENTICATED") == "Send the header X-Api-Key.", path
                assert answer.headers["www-authenticate"] == "ApiKey"
        if not path.startswith("/openapi"):
            refused(TestClient(mounted).request(method, path), 401, "UNAUTHENTICATED")
    assert api.get(order, headers={"X-Api-Key": "sesame"}).json() == before


def test_a_route_that_does_not_say_what_it_needs_cannot_be_made() -> None:
    gate = AccessControl(with_key, allow_anonymous=False, max_body_bytes=lambda: 1)
    made = APIRouter(route_class=make_guarded_route(gate))
    with pytest.raises(TypeError, match="declares no permission"):
        made.add_api_route("/open", lambda: "sesame")


def test_only_true_lets_anybody_in(shop: Shop) -> None:
    answers: list[Any] = []

    async def later(access: Access) -> Any:
        await asyncio.sleep(0)
        return answers[0]

    class ByObject:
        async def __call__(self, access: Access) -> Any:
            return answers[0]

    for hook in (lambda access: answers[0], later, ByObject()):
        api = shop.client(authorize=hook)
        for answers[:] in ([each] for each in (None, False, 0, 1, "yes", object(), [True])):
            refused(api.get("/workflows"), 403, "FORBIDDEN")
        answers[:] = [True]
        assert api.get("/workflows").status_code == 200


def test_what_a_hook_raises_or_answers_refuses(shop: Shop) -> None:
    def ask(error: Exception) -> Any:
        def hook(access: Access) -> bool:
            raise error

        return shop.client(authorize=hook).get("/workflows")

    assert refused(ask(Forbidden("Not on Sundays.")), 403, "FORBIDDEN") == "Not on Sundays."
    answer = ask(HTTPException(429, "Slowly.", headers={"Retry-After": "9"}))
    assert refused(answer, 429, "TOO_MANY_REQUESTS") == "Slowly."
    assert answer.headers["retry-after"] == "9"
    message = refused(ask(ValueError("the password of the directory is 123")), 500, "INTERNAL_ERROR")
    assert message == "The request failed. See the server's log."
    hand_made = shop.client(authorize=lambda access: PlainTextResponse("go away", 418)).get("/workflows")
    assert (hand_made.status_code, hand_made.text) == (418, "go away")


# --- rights -------------------------------------------------------------------------------------

WANTED = {
    "GET /healthz": Permission.HEALTH,
    "GET /readyz": Permission.HEALTH,
    "GET /openapi.json": Permission.READING,
    "GET /workflows": Permission.READING,
    "GET /instances": Permission.READING,
    "GET /stats": Permission.READING,
    "GET /waits": Permission.READING,
    "GET /limits": Permission.READING,
    "GET /limits/o-1": Permission.READING,
    "PATCH /limits/o-1": Permission.MANAGEMENT,
    "GET /workflows/o-1/instances": Permission.READING,
    "GET /workflows/o-1/instances/o-1": Permission.READING,
    "GET /workflows/o-1/instances/o-1/explain": Permission.READING,
    "GET /workflows/o-1/instances/o-1/history": Permission.READING,
    "GET /workflows/o-1/instances/o-1/published": Permission.READING,
    "GET /workflows/o-1/instances/o-1/stream": Permission.READING,
    "GET /topics/o-1/waiters": Permission.READING,
    "POST /_runner/tick": Permission.TICK,
    "POST /topics/o-1/emit": Permission.EVENTS,
    "POST /workflows/o-1/instances": Permission.CREATION,
    "POST /workflows/o-1/instances/batch": Permission.CREATION,
    "POST /workflows/o-1/instances/o-1/events": Permission.EVENTS,
    "POST /workflows/o-1/instances/o-1/fork": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/pause": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/resume": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/wake": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/restart": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/restart-or-create": Permission.CREATION,
    "POST /workflows/o-1/instances/o-1/retry": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/rewind": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/set-result": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/skip": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/terminate": Permission.MANAGEMENT,
    "POST /workflows/o-1/instances/o-1/cancel": Permission.MANAGEMENT,
}
WANTS_ANOTHER = {"POST /topics/o-1/emit"}
"""An emission reaches instances of all workflows: who sends it must be allowed to manage them too."""


def test_each_route_needs_one_right_and_nothing_passes_for_another(shop: Shop) -> None:
    table = {f"{method} {path}": (method, path) for method, path in routes(shop.client())}
    assert table.keys() == WANTED.keys()
    for right in Permission:
        hooks: dict[str, Callable[[Access], bool]] = {right.value: lambda access: True}
        api = shop.client(authorize=Authorize(**hooks), tick=True)
        for name, (method, path) in table.items():
            body = {"json": {}} if name in WANTS_ANOTHER else {}
            status = api.request(method, path, **body).status_code
            suffices = WANTED[name] is right and name not in WANTS_ANOTHER
            assert (status != 403) == suffices, (right, name, status)


def test_the_hook_for_every_request_and_that_of_the_right_must_both_agree(shop: Shop) -> None:
    asked: list[str] = []

    def request(access: Access) -> bool:
        asked.append("request")
        return True

    def reading(access: Access) -> bool:
        asked.append("reading")
        return access.workflow == "echo"

    api = shop.client(authorize=Authorize(request, reading=reading))
    assert api.get("/workflows/echo/instances").status_code == 200
    refused(api.get("/workflows/bad/instances"), 403, "FORBIDDEN")
    assert asked == ["request", "reading"] * 2
    assert api.get("/healthz").status_code == 200


def test_hooks_are_told_exactly_what_is_wanted(shop: Shop) -> None:
    asked: list[tuple[Any, ...]] = []

    def hook(access: Access) -> bool:
        asked.append((access.permission.value, access.operation, access.workflow, access.instance_id))
        return True

    api = shop.client(authorize=hook)
    api.get("/workflows")
    api.get("/workflows/echo/instances")
    api.get("/workflows/echo/instances/e-1/stream")
    api.post("/workflows/echo/instances/e%2D1/restart")
    api.post("/workflows/echo/instances/e-1%2Frestart/pause")  # no such route
    assert asked == [
        ("reading", "list_workflows", None, None),
        ("reading", "list_instances", "echo", None),
        ("reading", "stream", "echo", "e-1"),
        ("management", "restart", "echo", "e-1"),
    ]


def test_a_creation_is_asked_for_with_the_very_id_that_is_written(shop: Shop) -> None:
    asked: list[Any] = []

    def creation(access: Access) -> bool:
        asked.append(access.instance_id)
        return access.instance_id is None or not access.instance_id.startswith("vip")

    api = shop.client(authorize=Authorize(creation=creation))
    path = "/workflows/echo/instances"
    made = api.post(path, json={}).json()["id"]
    assert asked == [None, made]
    refused(api.post(path, json={"id": "vip-1"}), 403, "FORBIDDEN")
    asked.clear()
    batch = {"instances": [{"id": "e-1"}, {"id": "e-1"}, {"id": "vip-2"}, {"id": "e-2"}]}
    refused(api.post(f"{path}/batch", json=batch), 403, "FORBIDDEN")
    assert asked == [None, "e-1", "vip-2"]
    assert [item.id for item in shop.durable.internals.operations.queries.list().items] == [made]
    api.post(f"{path}/batch", json={"instances": [{"id": "e-1"}, {"id": "e-2"}]})
    assert [item.id for item in shop.durable.internals.operations.queries.list().items] == ["e-2", "e-1", made]


# --- the body -----------------------------------------------------------------------------------


def test_nothing_of_a_body_is_looked_at_before_its_sender_is_let_in(shop: Shop) -> None:
    received: list[int] = []

    async def receive() -> Any:
        received.append(1)
        return {"type": "http.request", "body": b"{" * 1000, "more_body": True}

    status, _ = asyncio.run(
        send(asgi(shop.durable, authorize=lambda access: False), "POST", "/workflows/echo/instances", receive)
    )
    assert (status, received) == (403, [])


@pytest.mark.parametrize("path", ["/workflows/echo/instances", "/workflows/echo/instances/e-1/pause"])
def test_an_endless_body_is_refused_where_the_cap_is_reached(shop: Shop, path: str) -> None:
    received: list[int] = []

    async def receive() -> Any:
        received.append(1)
        return {"type": "http.request", "body": b" " * 1000, "more_body": len(received) < 100}

    app = asgi(shop.durable, allow_anonymous=True, max_body_bytes=10_000)
    status, body = asyncio.run(send(app, "POST", path, receive))
    assert (status, body["code"], len(received)) == (413, "BODY_TOO_LARGE", 11)
    assert body["message"] == "The body of a request may have at most 10000 bytes."


def test_a_payload_has_its_own_limit_within_the_bodys(shop: Shop, api: TestClient) -> None:
    path = "/workflows/echo/instances"
    assert api.post(path, json={"id": "e-1", "params": "x" * (1024 * 1024 - 2)}).status_code == 201
    refused(api.post(path, json={"id": "e-2", "params": "x" * 1024 * 1024}), 413, "PAYLOAD_TOO_LARGE")
    refused(api.post(path, json={"id": "e-2", "params": "x" * 1200 * 1024}), 413, "BODY_TOO_LARGE")


def test_a_hook_may_read_the_body_to_check_its_signature(shop: Shop) -> None:
    async def signed(access: Access) -> bool:
        return b"sesame" in await access.request.body()

    api = shop.client(authorize=signed, max_body_bytes=100)
    path = "/workflows/echo/instances"
    assert api.post(path, json={"params": "sesame"}).status_code == 201
    refused(api.post(path, json={"params": "?"}), 403, "FORBIDDEN")
    refused(api.post(path, json={"params": "sesame" * 50}), 413, "BODY_TOO_LARGE")


# --- in an application --------------------------------------------------------------------------


def test_a_refusal_of_the_application_itself_reaches_the_client(shop: Shop) -> None:
    def check(key: int = Depends(_read_key)) -> int:
        return key

    app = FastAPI(dependencies=[Depends(check)])
    app.include_router(router(shop.durable, allow_anonymous=True))
    answer = TestClient(app).get("/workflows/echo/instances", headers={"X-Key": "none"})
    assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Key")


def _read_key(request: Request) -> int:
    try:
        return int(request.headers["X-Key"])
    except ValueError as exc:
        raise HTTPException(401, "The key is no number.", headers={"WWW-Authenticate": "Key"}) from exc


def test_a_router_in_an_application_answers_as_its_own_application_does(shop: Shop, order: str) -> None:
    seen: list[str] = []
    app = FastAPI()
    app.include_router(
        router(shop.durable, authorize=with_key), prefix="/api/v1", dependencies=[Depends(lambda: seen.append("asked"))]
    )
    api = TestClient(app)
    path = f"/api/v1{order}"
    refused(api.get(path), 401, "UNAUTHENTICATED")
    assert seen == []  # ours is the outermost layer
    api.headers["X-Api-Key"] = "sesame"
    assert api.get(path).json()["id"] == "o-1"
    assert seen == ["asked"]
    refused(api.get(f"{path}/history", params={"pageSize": 0}), 400, "INVALID_REQUEST")
    refused(api.post(f"{path}/events", content=b"{", headers={"Content-Type": "application/json"}), 400,
            "INVALID_REQUEST")  # fmt: skip
    assert "/api/v1/workflows" in app.openapi()["paths"]
    assert "Problem" in app.openapi()["components"]["schemas"]
    assert api.post("/api/v1/_runner/tick").status_code == 404


def test_an_application_can_be_mounted(shop: Shop, order: str) -> None:
    app = FastAPI()
    app.mount("/durable", asgi(shop.durable, authorize=with_key))
    api = TestClient(app)
    refused(api.get(f"/durable{order}"), 401, "UNAUTHENTICATED")
    assert api.get(f"/durable{order}", headers={"X-Api-Key": "sesame"}).json()["id"] == "o-1"
    described = api.get("/durable/openapi.json", headers={"X-Api-Key": "sesame"}).json()
    assert described["info"] == {"title": "celery_durable", "version": "1"}
    for path in ("/durable/docs", "/durable/redoc", "/durable/openapi.json/"):
        refused(api.get(path, headers={"X-Api-Key": "sesame"}), 404, "NOT_FOUND")


def test_an_application_that_nobody_uses_is_collected(shop: Shop) -> None:
    """FastAPI remembers functions for ever."""
    app = weakref.ref(asgi(shop.durable, allow_anonymous=True))
    # A collection does nothing while another thread collects what earlier tests have left.
    until(lambda: gc.collect() >= 0 and app() is None, seconds=10)
