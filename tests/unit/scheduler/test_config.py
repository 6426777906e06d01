"""The scheduler's configuration: every problem at once, each with its variable."""

import pytest
from headway_scheduler.config import Config, ConfigError, load


@pytest.fixture
def environment(monkeypatch):
    def put(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(f"HEADWAY_SCHEDULER_{name}" if not name.startswith("HEADWAY_") else name, value)

    return put


def problems(environment, **variables):
    environment(**variables)
    with pytest.raises(ConfigError) as caught:
        load()
    return str(caught.value).splitlines()


def test_defaults_listen_on_loopback_alone(environment):
    environment(NAME="s1")
    config = load()
    assert config.on_loopback
    assert not config.credentials_required


def test_all_problems_are_reported_at_once_each_with_its_variable(environment):
    found = problems(environment, NAME="a b", SEED="x", MAX_WAIT_S="-1", NONSENSE="1", LOG_LEVEL="loud")
    names = {line.split(":")[0].removeprefix("HEADWAY_SCHEDULER_") for line in found}
    assert names == {"NAME", "SEED", "MAX_WAIT_S", "NONSENSE", "LOG_LEVEL"}


def test_an_unknown_setting_alone(environment):
    assert problems(environment, STALE_AFTER="9") == ["HEADWAY_SCHEDULER_STALE_AFTER: no such setting"]


@pytest.mark.parametrize(
    ("variables", "word"),
    [
        ({"LISTEN": "nowhere"}, "HOST:PORT"),
        ({"LISTEN": "127.0.0.1:70000"}, "HOST:PORT"),
        ({"LISTEN": "0.0.0.0:1"}, "HEADWAY_DATABASE_URL"),
        ({"LISTEN_HTTP": "0.0.0.0:1", "HEADWAY_DATABASE_URL": "postgresql://x"}, "insecure"),
        ({"TLS_KEY": __file__}, "together"),
        ({"HTTP_TLS": "true"}, "http_tls needs tls_certificate and tls_key"),
        ({"TLS_KEY": __file__, "TLS_CERTIFICATE": "/none"}, "tls_certificate: there is no file /none"),
        ({"STALE_AFTER_S": "1", "TELEMETRY_INTERVAL_S": "1"}, "telemetry_interval_s"),
        ({"GUARDS_OFF": "heat,not_ready"}, "not not_ready"),
        ({"PRESSURE_OPEN": "0.9"}, "pressure_open must not be above pressure_close"),
        ({"HEAT_CLOSE": "0.9"}, "heat_open must not be above heat_close"),
        ({"THROTTLE_REASONS": "hw_thermal, power_brake"}, "throttle_reasons: must be of"),
        ({"IGNORED_XIDS": "13,x"}, "ignored_xids must be numbers"),
        ({"EJECT_BASE_S": "200"}, "eject_base_s must not be above eject_max_s"),
        ({"SLOW_START_AFTER": "lunch"}, "slow_start_after: must be of ejection, new, restart, not lunch"),
    ],
)
def test_what_does_not_fit_together(environment, variables, word):
    (line,) = problems(environment, **variables)
    assert word in line


def test_beyond_loopback_credentials_are_required(environment):
    environment(LISTEN="0.0.0.0:1", INSECURE="true", HEADWAY_DATABASE_URL="postgresql://x")
    assert load().credentials_required
    environment(REQUIRE_CREDENTIALS="false")
    assert not load().credentials_required


def test_ipv6_loopback():
    assert Config(listen="[::1]:1", listen_http="localhost:1").on_loopback


@pytest.mark.parametrize("url", ["garbage", "mysql://u:secret@h/x", "postgresql://u:secret@h:port/x", "host=h user=u"])
def test_a_database_url_that_is_none_of_postgres_is_a_problem_and_not_repeated(environment, url):
    (line,) = problems(environment, HEADWAY_DATABASE_URL=url)
    assert line.startswith("HEADWAY_DATABASE_URL: ")
    assert line.endswith("must be a URL like postgresql://user@host/database")
    assert "secret" not in line


@pytest.mark.parametrize(
    "url", ["", "postgresql://u@h/x", "postgresql+psycopg://u@/x?host=/run", "postgres://u@h/x", "postgresql://x"]
)
def test_a_database_url_of_postgres(environment, url):
    environment(HEADWAY_DATABASE_URL=url)
    assert load().database_url == url
