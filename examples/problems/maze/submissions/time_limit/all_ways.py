import sys

sys.setrecursionlimit(10000)
maze = sys.stdin.read().split()
height, width = len(maze), len(maze[0])
best = height * width + 1


def walk(r, c, steps, seen):
    global best
    if (r, c) == (height - 1, width - 1):
        best = min(best, steps)
    for a, b in ((-1, 0), (0, -1), (0, 1), (1, 0)):
        there = (r + a, c + b)
        if 0 <= there[0] < height and 0 <= there[1] < width and there not in seen:
            if maze[there[0]][there[1]] == ".":
                walk(*there, steps + 1, seen | {there})


walk(0, 0, 0, {(0, 0)})
print(best if best <= height * width else -1)
