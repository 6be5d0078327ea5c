"""What this host's kernel can do that another's may not: the names by which creations ask for it (`require_features`).

A feature is what a probe of `dsec doctor` found that is marked as one, by the probe's name with dashes; where there are
several levels of it, each has a name.
"""

from __future__ import annotations

import re

from dsec.kernel.cgroups import CgroupRoot
from dsec.kernel.host import probe_host
from dsec.kernel.probes import FEATURES
from dsec.kernel.probes_isolation import landlock_abi


def kernel_features() -> frozenset[str]:
    """Tried anew: takes some tens of milliseconds, and leaves nothing."""
    found = {re.sub(r"\W+", "-", each.name) for each in probe_host(only=FEATURES) if each.ok}
    found |= {f"landlock-abi-{level}" for level in range(1, landlock_abi() + 1)}
    if CgroupRoot.detect("dsec-doctor").version == "v2":
        found.add("cgroup-v2")
    return frozenset(found)
