"""The node agent. A tour: `client` says what it offers, `node` composes it, `lives` owns every sandbox from admission
to its last trace, `gate` decides who starts, `naming` who gets which sandbox by name or key, `commands` and `outcome`
run commands and say how they ended, `files` moves bytes, `access` knows keys and tokens.
"""
