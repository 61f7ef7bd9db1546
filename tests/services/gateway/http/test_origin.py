import json

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message, Receive, Scope, Send

from pagewire.services.gateway.http.origin import PageGuard, allowed_pages
from pagewire.shared.settings.config import Settings

pytestmark = pytest.mark.anyio

SITE = "https://evil.example"


async def hello(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


async def ask(settings: Settings, method: str = "POST", **headers: str) -> tuple[int, str]:
    """Returns the status and the body of an answer."""
    answer: list[Message] = []

    async def send(message: Message) -> None:
        answer.append(message)

    lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "path": "/v1/completions", "method": method, "headers": lines}
    await PageGuard(hello, allowed_pages(settings))(scope, None, send)  # type: ignore[arg-type]
    return answer[0]["status"], answer[1]["body"].decode()


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
)
@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "127.8.8.8"])
async def test_a_foreign_name_is_refused_on_loopback_with_the_flag_that_allows_it(host: str, address: str) -> None:
    status, body = await ask(Settings(host=address), host=host)
    assert status == 403
    error = json.loads(body)["error"]
    assert error["code"] == "host_not_allowed"
    assert f"--allowed-hosts {host.partition(':')[0]}" in error["message"]


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "LOCALHOST", "127.0.0.1:8000", "[::1]:8000", "10.1.2.3", "a.localhost", "host.docker.internal"],
)
async def test_names_and_addresses_of_the_machine_are_answered(host: str) -> None:
    assert (await ask(Settings(), host=host))[0] == 200


@pytest.mark.parametrize("origin", [SITE, "null", "http://localhost:3000", "vscode-webview://abc"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
async def test_a_foreign_page_is_refused_on_loopback_with_the_flag_that_allows_it(origin: str, method: str) -> None:
    status, body = await ask(Settings(), method, host="localhost:8000", origin=origin)
    assert status == 403
    assert f"--allowed-origins {origin}" in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("allowed", [SITE, "*", f'["http://a.example", "{SITE}"]'])
async def test_an_allowed_page_is_answered(allowed: str) -> None:
    settings = Settings(allowed_origins=allowed)
    assert (await ask(settings, host="localhost", origin=SITE, content_type="application/json"))[0] == 200


async def test_a_page_of_the_server_itself_is_answered() -> None:
    page = {"host": "localhost:8000", "origin": "http://localhost:8000", "content_type": "application/json"}
    assert (await ask(Settings(), **page))[0] == 200


@pytest.mark.parametrize("allowed", ["llm.example", "*", "a.example,llm.example"])
async def test_an_allowed_name_is_answered(allowed: str) -> None:
    assert (await ask(Settings(allowed_hosts=allowed), host="llm.example:443"))[0] == 200


@pytest.mark.parametrize("settings", [Settings(api_key="secret"), Settings(host="0.0.0.0")])
async def test_a_server_with_a_key_or_for_a_network_answers_any_name_and_page(settings: Settings) -> None:
    assert (await ask(settings, host="llm.example", origin=SITE, content_type="application/json"))[0] == 200


@pytest.mark.parametrize("settings", [Settings(), Settings(api_key="secret")])
@pytest.mark.parametrize(
    "media_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"]
)
async def test_a_body_that_is_not_json_is_refused(settings: Settings, media_type: str) -> None:
    status, body = await ask(settings, host="localhost", content_type=media_type)
    assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("settings", [Settings(host="0.0.0.0"), Settings(api_key="secret")])
@pytest.mark.parametrize(
    "page", [{"origin": SITE}, {"origin": "null"}, {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"}]
)
async def test_a_page_must_say_that_its_body_is_json(settings: Settings, page: dict[str, str]) -> None:
    """A browser sends a `Blob` without a type, and so without a Content-Type, to any site."""
    for lines in (page, page | {"content_type": ""}):
        status, body = await ask(settings, host="10.1.2.3", **lines)
        assert (status, json.loads(body)["error"]["code"]) == (415, "unsupported_media_type")
    assert (await ask(settings, host="10.1.2.3", content_type="application/json", **page))[0] == 200
    assert (await ask(settings, "GET", host="10.1.2.3", **page))[0] == 200


@pytest.mark.parametrize("sender", [{}, {"sec_fetch_site": "same-origin"}, {"sec_fetch_site": "none"}])
async def test_a_sender_that_is_no_page_of_another_site_needs_no_media_type(sender: dict[str, str]) -> None:
    assert (await ask(Settings(), host="localhost", **sender))[0] == 200


@pytest.mark.parametrize(
    "media_type", ["application/json", "Application/JSON; charset=utf-8", "application/vnd.x+json"]
)
async def test_json_is_taken(media_type: str) -> None:
    assert (await ask(Settings(), content_type=media_type))[0] == 200
