"""When certificates end: as openssl tells it of the same files."""

import ssl
from datetime import UTC, datetime
from pathlib import Path

import pytest
from headway_scheduler.certificates import expires_at
from headway_scheduler.store import migrate, schema
from hypothesis import given
from hypothesis import strategies as st

TLS = Path(__file__).parents[2] / "golden" / "tls"
CERTIFICATES = sorted(path for path in TLS.glob("*.pem") if not path.name.endswith("key.pem"))


@pytest.mark.parametrize("path", CERTIFICATES, ids=lambda path: path.name)
def test_as_openssl_reads_it(path):
    told = ssl._ssl._test_decode_cert(str(path))["notAfter"]
    expected = datetime.strptime(told, "%b %d %H:%M:%S %Y GMT").replace(tzinfo=UTC)
    assert expires_at(path.read_bytes()) == expected.timestamp()


def test_what_stands_before_and_behind_it_does_not_matter():
    pem = CERTIFICATES[0].read_bytes()
    assert expires_at(b"subject=x\n" + pem + CERTIFICATES[1].read_bytes()) == expires_at(pem)


@given(st.binary(max_size=200), st.integers(0, 600))
def test_what_is_no_certificate_ends_never(noise, cut):
    pem = CERTIFICATES[0].read_bytes()
    assert expires_at(noise) is None
    half = pem[:cut]
    assert expires_at(half) is None or half.count(b"END") == 1
    der = ssl.PEM_cert_to_DER_cert(pem.decode())[: cut // 2] + noise
    expires_at(ssl.DER_cert_to_PEM_cert(der).encode())


def test_the_schema_knows_its_migration():
    assert migrate.head() == schema.REVISION
