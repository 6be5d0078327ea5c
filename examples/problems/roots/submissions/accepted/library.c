#include <math.h>
#include <stdio.h>

int main(void) {
    double x;
    while (scanf("%lf", &x) == 1) printf("%.9f\n", sqrt(x));
    return 0;
}
