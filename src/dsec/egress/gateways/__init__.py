"""The gateways of the network: each a plain HTTP service at a name of its own inside, and a real upstream outside,
where a rule is finer than a name. docs/GATEWAYS.md says what each allows.

`build.open_gateways` makes them all; `base.BaseGateway` is what they share: answers, audit, the upstream client
(`outside`), the cache on disk (`cache`), the paths (`paths`) and the secrets that never go inside (`secrets`).
"""

from __future__ import annotations
