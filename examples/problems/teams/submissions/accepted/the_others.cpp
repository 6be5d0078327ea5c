#include <cstdio>
#include <numeric>
#include <vector>

int main() {
    int n;
    if (scanf("%d", &n) != 1) return 1;
    std::vector<int> strengths(n);
    for (auto &each : strengths)
        if (scanf("%d", &each) != 1) return 1;
    int whole = std::accumulate(strengths.begin(), strengths.end(), 0);
    for (int team = (1 << n) - 2; team > 0; team--) {
        int sum = 0;
        for (int i = 0; i < n; i++) sum += team >> i & 1 ? strengths[i] : 0;
        if (2 * sum != whole) continue;
        for (int i = n - 1; i >= 0; i--)
            if (team >> i & 1) printf("%d ", i + 1);
        printf("\n");
        return 0;
    }
}
