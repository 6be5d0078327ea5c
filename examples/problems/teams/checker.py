"""Accepts any team that is as strong as the others: exit code 42; 43 refuses."""

import sys

given, output, _ = (open(path).read().split() for path in sys.argv[1:])
strengths = [int(each) for each in given[1:]]
try:
    team = [int(each) for each in output]
except ValueError:
    print("these are no numbers")
    sys.exit(43)
if len(set(team)) != len(team) or not all(1 <= each <= len(strengths) for each in team):
    print("there are no such players")
    sys.exit(43)
sys.exit(42 if 2 * sum(strengths[each - 1] for each in team) == sum(strengths) else 43)
