"""The launcher as a program. `dsec` is only a name here, for the modules of this package: what the rest needs isn't to
be found (`-S`), and would be memory of a process that stays."""

import importlib
import sys
import types
from pathlib import Path

_dsec = types.ModuleType("dsec")
_dsec.__path__ = [str(Path(__file__).parents[2])]
sys.modules["dsec"] = _dsec
importlib.import_module("dsec.vmm.launcher.serving").main()
