import sys

for line in sys.stdin:
    print(round(float(line) ** 0.5, 3))
