"""Requests of our clients are those that the official ones send, which tests/golden/launch/clients.py has confirmed."""

import json

from tests.golden.launch.sent import PATH, recorded


def test_requests_are_those_that_the_official_clients_have_confirmed():
    stored, now = json.loads(PATH.read_text()), recorded()
    assert now == stored, "`python -m tests.golden.launch.sent`, then tests/golden/launch/clients.py confirms it"
    assert {one["method"] for one in stored} == {"GET", "POST", "DELETE"}
