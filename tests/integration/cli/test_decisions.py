"""`headway decisions` and `explain ID`, against a real scheduler."""

import itertools
import json
import subprocess
import sys

import yaml

PROMPT = ["--text", "Why is the sky blue?", "--max-tokens", "64"]


def routed(headway, request_id, *options):
    return headway.json("route", "-m", "llama", *PROMPT, "--request-id", request_id, *options)


def test_a_decision_is_listed_shown_and_explained(headway, fleet):
    assert headway.text("decisions", "list") == "no decisions\n"
    answer = routed(headway, "r1", "--finish")
    address = answer["endpoint"]["address"]
    head, row = headway.text("decisions", "list").splitlines()[::2][:2]
    assert head.split()[:3] == ["time", "request", "tenant"]
    assert row.split()[1:6] == ["r1", "default", "llama", "adaptive", f"{address}@0"]
    assert row.split()[-1] == "cancelled"
    shown = headway.text("decisions", "show", "r1")
    assert shown == headway.text("explain", "r1")
    assert shown == headway.text("explain", answer["reservation_id"])
    chosen = next(line for line in shown.splitlines() if line.startswith("➜"))
    assert chosen.split()[1] == f"{address}@0"
    assert "r1 of default for llama at" in shown
    assert "adaptive chose among 2; 0 of 5 prompt tokens cached" in shown
    plain = headway.json("decisions", "show", "r1")
    assert [each["chosen"] for each in plain["candidates"]].count(True) == 1
    assert len(plain["candidates"]) == 2


def test_a_refusal_says_why(headway, fleet):
    headway.error("route", "-m", "llama", *PROMPT, "--label", "tier=none", "--max-wait", "0", "--request-id", "r2")
    (refused,) = headway.json("decisions", "list", "--outcome", "refused")
    assert (refused["request_id"], refused["refusal"]["reason"]) == ("r2", "NO_ENDPOINTS")
    assert "refused: NO_ENDPOINTS: " in headway.text("explain", "r2")


def test_lists_are_filtered_and_limited(headway, fleet):
    for number in range(5):
        routed(headway, f"r{number}")
    found = headway.json("decisions", "list", "--limit", "3", "--model", "llama", "--since", "1h")
    assert [each["request_id"] for each in found] == ["r4", "r3", "r2"]
    assert headway.json("decisions", "list", "--tenant", "nobody") == []
    assert len(yaml.safe_load(headway.text("decisions", "list", "-o", "yaml"))) == 5


def test_following_shows_them_as_they_are_made(headway, scheduler, fleet):
    command = [sys.executable, "-m", "headway_cli.main", "--scheduler", scheduler.address, "-o", "json"]
    command += ["decisions", "list", "--follow", "--limit", "2"]
    following = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        numbers = itertools.count()
        while following.poll() is None:
            routed(headway, f"f{next(numbers)}", "--finish")
        seen = [json.loads(line) for line in following.communicate(timeout=20)[0].splitlines()]
    finally:
        following.kill()
        following.wait()
    assert len(seen) == 2 and all(each["request_id"].startswith("f") for each in seen)


def test_what_is_not_there(headway, fleet):
    assert "'decisions/nothing' does not exist" in headway.error("decisions", "show", "nothing")
    assert "give --model of a new request, or the id of a past one" in headway.error("explain", code=2)
    assert "or the id of a past one" in headway.error("explain", "r1", "-m", "llama", code=2)
