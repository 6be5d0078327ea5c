def matched(line, at):
    while at < len(line) and line[at] in "([":
        end = matched(line, at + 1)
        if line[end : end + 1] != {"(": ")", "[": "]"}[line[at]]:
            return len(line) + 1
        at = end + 1
    return at


line = input().strip()
print("yes" if matched(line, 0) == len(line) else "no")
