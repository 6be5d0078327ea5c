import sys
from collections import Counter

print(max(Counter(sys.stdin.read().split()).items(), key=lambda each: (each[1], each[0]))[0])
