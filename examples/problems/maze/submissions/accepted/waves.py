import sys

maze = sys.stdin.read().split()
height, width = len(maze), len(maze[0])
seen = {(0, 0)}
wave, steps = [(0, 0)], 0
while wave and (height - 1, width - 1) not in seen:
    steps += 1
    near = {(r + a, c + b) for r, c in wave for a, b in ((0, 1), (1, 0), (0, -1), (-1, 0))}
    wave = [(r, c) for r, c in near - seen if 0 <= r < height and 0 <= c < width and maze[r][c] == "."]
    seen.update(wave)
print(steps if (height - 1, width - 1) in seen else -1)
