"""How `make serve` has Serve run HAProxy: beside other servers of the same machine, without touching them."""

from pathlib import Path

from deployments import haproxy


def test_two_servers_on_one_machine_share_no_port_and_no_file(tmp_path: Path) -> None:
    """Serve's proxies listen with SO_REUSEPORT: on one port, two clusters would get each other's requests."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = haproxy.settings(tmp_path / "a"), haproxy.settings(tmp_path / "b")
    own = [name for name in a if name.endswith("_PORT") or a[name].startswith(str(tmp_path))]
    assert "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT" in own and len(own) == 8
    values = [settings[name] for settings in (a, b) for name in own]
    assert len(set(values)) == len(values)
