import sys

for line in sys.stdin:
    print("nan")
