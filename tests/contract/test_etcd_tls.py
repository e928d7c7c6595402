"""The store over mutual TLS, with certificates made for the test."""

from pathlib import Path

import pytest
import trustme

from kvlease.core.errors import InvalidArgument, StoreUnavailable
from kvlease.dev.embedded_etcd import EmbeddedEtcd
from kvlease.registry.config import RegistryConfig
from kvlease.store.etcd import EtcdStore
from kvlease.store.settings import make_store
from stubs.certificates import Authority
from stubs.etcd import options_of
from stubs.records import engine


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """`ca.pem`, and `server` and `client` certificates that it signed, each with its key."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("server", "client"):
        certificate = authority.issue_cert("127.0.0.1", common_name=name)
        certificate.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        for blob in certificate.cert_chain_pems:
            blob.write_to_path(tmp_path / f"{name}.pem", append=True)
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


async def test_the_store_follows_the_certificates_of_tls_dir_without_a_restart(tmp_path: Path) -> None:
    authority, other = Authority(), Authority()
    served = authority.issue(tmp_path / "etcd")
    own = authority.issue(tmp_path / "own", "kvlease-registry")
    url = "https://127.0.0.1:0"
    etcd = EmbeddedEtcd(
        (
            *("--listen-client-urls", url, "--advertise-client-urls", url),
            *("--cert-file", str(served / "tls.crt"), "--key-file", str(served / "tls.key")),
            *("--trusted-ca-file", str(served / "ca.crt"), "--client-cert-auth"),
        )
    )
    await etcd.start()
    settings = RegistryConfig(
        etcd_endpoints=f"https://{etcd.endpoint}", tls_dir=str(own), store_call_s=5.0, etcd_accept_old=True
    )
    settings.validate()
    store = make_store(settings)
    try:
        assert await store.list_engines() == ()
        other.issue(own, "kvlease-registry")
        with pytest.raises(StoreUnavailable):
            await store.list_engines()
        authority.issue(own, "kvlease-registry")
        assert await store.list_engines() == ()
    finally:
        await store.close()
        await etcd.stop()
