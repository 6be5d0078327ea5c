import sys

for line in sys.stdin:
    print(float(line) ** 0.5)
