"""The store over mutual TLS, with certificates made for the test."""

import subprocess
from pathlib import Path

import pytest

from kvlease.core.errors import InvalidArgument, StoreUnavailable
from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.store.etcd import EtcdStore
from stubs.etcd import options_of
from stubs.records import engine


def openssl(directory: Path, *arguments: str) -> None:
    subprocess.run(["openssl", *arguments], cwd=directory, check=True, capture_output=True)


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """`ca.pem`, and `server` and `client` certificates that it signed, each with its key."""
    new = ("req", "-newkey", "rsa:2048", "-nodes")
    openssl(
        tmp_path, *new, "-x509", "-days", "2", "-subj", "/CN=test ca", "-keyout", "ca.key", "-out", "ca.pem"
    )
    for name, extension in (
        ("server", "subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth"),
        ("client", "extendedKeyUsage=clientAuth"),
    ):
        (tmp_path / f"{name}.ext").write_text(extension)
        openssl(tmp_path, *new, "-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.csr")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        openssl(
            tmp_path,
            *("x509", "-req", "-in", f"{name}.csr", *signer),
            *("-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
    return tmp_path


async def test_only_a_client_with_the_right_certificates_is_served(certificates: Path) -> None:
    url = "https://127.0.0.1:0"
    etcd = EmbeddedEtcd(
        (
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *(
                "--cert-file",
                str(certificates / "server.pem"),
                "--key-file",
                str(certificates / "server.key"),
            ),
            *("--trusted-ca-file", str(certificates / "ca.pem"), "--client-cert-auth"),
        )
    )
    await etcd.start()
    ca = {"ca_file": str(certificates / "ca.pem")}
    own = {
        "certificate_file": str(certificates / "client.pem"),
        "key_file": str(certificates / "client.key"),
    }
    known = EtcdStore(options_of(etcd, **ca, **own))
    strangers = [EtcdStore(options_of(etcd)), EtcdStore(options_of(etcd, **ca))]
    try:
        session = await known.open_session(engine(), 600.0)
        assert await session.renew()
        async with known.watch_engines() as batches:
            assert [change.item for change in (await anext(batches)).changes] == [engine()]
        for stranger in strangers:
            with pytest.raises(StoreUnavailable):
                await stranger.list_engines()
    finally:
        for store in (known, *strangers):
            await store.close()
        await etcd.stop()


def test_a_certificate_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.pem")
    with pytest.raises(InvalidArgument, match=r"missing\.pem"):
        EtcdStore(options_of(EmbeddedEtcd(), endpoints=("127.0.0.1:1",), ca_file=missing))
