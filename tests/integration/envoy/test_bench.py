"""`headway bench envoy` measures what it says, with processes that are gone afterwards."""

import psutil
from headway_bench.envoy import EnvoyBench, EnvoySettings


async def test_a_short_run_has_every_figure_and_leaves_nothing_behind():
    settings = EnvoySettings(endpoints=3, connections=2, seconds=0.2, prompt_bytes=500)
    found = await EnvoyBench(settings).run()
    assert found["settings"] == {"endpoints": 3, "connections": 2, "seconds": 0.2, "prompt_bytes": 500}
    assert {"requests_per_s", "p50_ms", "cpu_us"} <= set(found["direct"])
    for way in ("ext_proc", "ext_proc_buffered", "ext_authz", "ext_authz_http"):
        row = found[way]
        assert row["requests_per_s"] > 0 and row["p50_ms"] > 0
        assert row["cpu_us"] > 0
        assert row["cpu_us_over_direct"] == round(row["cpu_us"] - found["direct"]["cpu_us"], 1)
    assert found["ext_proc_400kb"]["requests_per_s_a_core"] > 0
    left = [child for child in psutil.Process().children(recursive=True) if "headway" in " ".join(child.cmdline())]
    assert not [child for child in left if "headway_bench" in " ".join(child.cmdline())]
