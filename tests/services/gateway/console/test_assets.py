import gzip
import re

import pytest

from pagewire.services.gateway.console import assets
from tests.services.gateway.http_client import Gateway, start_gateway

pytestmark = pytest.mark.anyio

ASSETS = assets.load()
LARGEST = 100_000
"""Bytes of all files together, as they are sent."""


async def test_the_page_is_served_at_the_root(gateway: Gateway) -> None:
    page = await gateway.get("/")
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"<title>Pagewire</title>" in page.body


async def test_the_page_needs_no_key_and_its_data_does() -> None:
    gateway = await start_gateway(api_key="secret")
    for path in ASSETS:
        assert (await gateway.get(path)).status == 200, path
    for path in ("/console/events", "/console/requests/r1", "/v1/models"):
        assert (await gateway.get(path)).status == 401, path


async def test_every_file_that_the_page_names_is_served_and_comes_from_this_server(gateway: Gateway) -> None:
    texts = {path: asset.content.decode() for path, asset in ASSETS.items()}
    named = re.findall(r'(?:href|src)="([^"#]+)"', texts["/"])
    for path, text in texts.items():
        folder = path.rpartition("/")[0]
        for module in re.findall(r'(?:import|from) "([^"]+)"', text):
            parts = f"{folder}/{module}".replace("/./", "/")
            named.append(re.sub(r"/[^/]+/\.\./", "/", parts))
    assert len(named) > 40
    assert set(named) <= ASSETS.keys()


@pytest.mark.parametrize("path", ASSETS)
async def test_nothing_runs_but_files_of_this_server(gateway: Gateway, path: str) -> None:
    headers = (await gateway.get(path)).headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    text = ASSETS[path].content.decode()
    assert not re.search(r"<script(?![^>]*src)|<style|\sstyle=|\son\w+=\"|javascript:|innerHTML|eval\(", text), path


async def test_an_unchanged_file_is_answered_with_304(gateway: Gateway) -> None:
    first = await gateway.get("/console/main.js")
    assert first.headers["cache-control"] == "no-cache"
    again = await gateway.get("/console/main.js", **{"if-none-match": first.headers["etag"]})
    assert (again.status, again.body) == (304, b"")
    other = await gateway.get("/console/base.css", **{"if-none-match": first.headers["etag"]})
    assert other.status == 200


async def test_files_are_compressed_for_whoever_takes_that(gateway: Gateway) -> None:
    plain = await gateway.get("/console/base.css")
    assert "content-encoding" not in plain.headers
    compressed = await gateway.get("/console/base.css", **{"accept-encoding": "br, gzip"})
    assert compressed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(compressed.body) == plain.body
    assert plain.headers["vary"] == compressed.headers["vary"] == "Accept-Encoding"


def test_all_files_together_are_small() -> None:
    assert sum(len(asset.compressed) for asset in ASSETS.values()) < LARGEST
