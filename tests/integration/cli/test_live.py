"""route, explain, fleet and what happens when nobody answers, against a real scheduler."""

import json
from pathlib import Path

import yaml
from fakes.headway import Headway, running_scheduler

TLS = Path(__file__).parents[2] / "golden" / "tls"


def test_a_route_is_answered_and_given_back(headway, scheduler, fleet):
    prompt = ["--text", "Why is the sky blue?", "--max-tokens", "64"]
    answer = headway.json("route", "--model", "llama", *prompt)
    assert answer["endpoint"]["address"] in {"10.0.0.7:8000", "10.0.0.7:8001"}
    assert answer["decision"]["strategy"] == "strategies/adaptive"
    assert scheduler.call(lambda: len(scheduler.scheduler.ledger.reservations)) == 1
    shown = headway.text("route", "--model", "llama", *prompt, "--finish")
    assert "adaptive chose among 2; 0 of 5 prompt tokens cached; predicted TTFT " in shown
    assert "the place is given back" in shown
    assert scheduler.call(lambda: len(scheduler.scheduler.ledger.reservations)) == 1


def test_every_form_of_prompt_and_limit_reaches_the_scheduler(headway, fleet, tmp_path):
    file = tmp_path / "prompt.txt"
    file.write_text("x" * 4000)
    assert headway.json("route", "-m", "llama", "--file", str(file), "--finish")["decision"]["prompt_tokens"] == 1000
    answer = headway.json("route", "-m", "llama", "--tokens", "1,2,3", "--exclude", "10.0.0.7:8000", "--finish")
    assert (answer["decision"]["prompt_tokens"], answer["endpoint"]["address"]) == (3, "10.0.0.7:8001")
    assert "tokens.ids[1]: -2 is not in" in headway.error("route", "-m", "llama", "--tokens", "1,-2")
    assert headway.json("route", "-m", "llama", "--label", "tier=gold", "--finish")["finished"] is True
    assert "NO_ENDPOINTS" in headway.error("route", "-m", "llama", "--label", "tier=none", "--max-wait", "0")
    first = headway.json("route", "-m", "llama", "--request-id", "r1", "--priority", "standard")
    assert headway.json("route", "-m", "llama", "--request-id", "r1") == {**first}
    file.write_bytes(b"\xff")
    assert "is no text in UTF-8" in headway.error("route", "-m", "llama", "--file", str(file), code=2)


def test_explain_shows_every_endpoint_and_reserves_nothing(headway, scheduler, fleet):
    headway.run("endpoints", "cordon", "10.0.0.7:8001@0")
    table = headway.text("explain", "--model", "llama", "--text", "Why?")
    chosen, cordoned = (line for line in table.splitlines() if "10.0.0.7" in line)
    assert chosen.startswith("➜")
    assert chosen.split()[1:3] == ["10.0.0.7:8000@0", "gpu-7"]
    assert "cordoned" in cordoned
    assert "adaptive chose among 1" in table
    plain = headway.json("explain", "--model", "llama", "--strategy", "round_robin")
    assert plain["decision"]["strategy"] == "strategies/round_robin"
    assert plain["rows"][1]["hard_guards"] == ["cordoned"]
    assert plain["refusal"] is None
    headway.run("nodes", "cordon", "gpu-7")
    assert "Route would refuse: ALL_DRAINING" in headway.text("explain", "--model", "llama")
    assert headway.json("explain", "--model", "llama")["refusal"]["reason"] == "ALL_DRAINING"
    assert scheduler.call(lambda: len(scheduler.scheduler.ledger.reservations)) == 0


def test_the_fleet_is_shown_as_it_is(headway, fleet):
    status = headway.text("fleet", "status")
    assert "1 nodes, 2 endpoints, 2 healthy" in status
    assert "adaptive" in status
    nodes = headway.text("fleet", "nodes")
    assert "gpu-7" in nodes
    assert "NVIDIA A100-SXM4-40GB" in nodes
    endpoints = headway.json("fleet", "endpoints")
    assert [endpoint["sample"]["kv_use"]["value"] for endpoint in endpoints] == [0.25, 0.25]
    assert "10.0.0.7:8001@0" in headway.text("fleet", "endpoints", "--model", "llama")
    assert headway.text("fleet", "endpoints", "--model", "other") == "no endpoints\n"
    assert yaml.safe_load(headway.text("fleet", "status", "-o", "yaml"))["endpoints"] == 2


def test_a_watch_shows_each_look(headway, fleet):
    look = ["--watch", "--interval", "0.1", "--count", "3"]
    lines = headway.text("fleet", "endpoints", *look, "-o", "json").splitlines()
    assert [len(json.loads(line)) for line in lines] == [2, 2, 2]
    assert len(list(yaml.safe_load_all(headway.text("fleet", "nodes", *look, "-o", "yaml")))) == 3
    assert "gpu-7" in headway.text("fleet", "nodes", *look)


def test_an_empty_fleet_is_no_error(headway):
    assert headway.text("fleet", "nodes") == "no nodes\n"
    assert "0 nodes, 0 endpoints" in headway.text("fleet", "status")
    headway.run("models", "create", "llama")
    assert "NO_ENDPOINTS" in headway.text("explain", "--model", "llama")


def test_nobody_answering_is_said_in_one_line():
    nobody = Headway("127.0.0.1:1")
    said = nobody.error("tenants", "list", code=3)
    assert said.startswith("error: UNREACHABLE: no scheduler answers at 127.0.0.1:1: ")
    assert said.count("\n") == 1
    error = json.loads(nobody.error("tenants", "create", "acme", "-o", "json", code=3))
    assert error["error"]["reason"] == "UNREACHABLE"


def test_tls_and_a_token(database_url):
    with running_scheduler(
        database_url, tls_certificate=TLS / "certificate.pem", tls_key=TLS / "key.pem", require_credentials=True
    ) as running:
        headway = Headway(running.address)
        assert "UNREACHABLE" in headway.error("tenants", "list", "--timeout", "5", code=3)
        trusting = ["--ca", str(TLS / "certificate.pem"), "--server-name", "headway.test"]
        assert "UNREACHABLE" in headway.error("tenants", "list", *trusting[:2], code=3)  # the name is not in it
        assert "error: NO_CREDENTIAL: " in headway.error("tenants", "list", *trusting)
        assert "NO_CREDENTIAL" in headway.error(*trusting, "tenants", "list", "--token", "hw_wrong")


def test_a_prompt_reaches_no_log(headway, fleet, capfd):
    headway.run("route", "--model", "llama", "--text", "SECRET-PROMPT", "--finish")
    headway.run("explain", "--model", "llama", "--text", "SECRET-PROMPT")
    captured = capfd.readouterr()
    assert "SECRET-PROMPT" not in captured.out + captured.err
