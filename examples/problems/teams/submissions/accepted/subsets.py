from itertools import combinations

n = int(input())
strengths = list(map(int, input().split()))
for size in range(1, n):
    for team in combinations(range(n), size):
        if 2 * sum(strengths[each] for each in team) == sum(strengths):
            print(*(each + 1 for each in team))
            raise SystemExit
