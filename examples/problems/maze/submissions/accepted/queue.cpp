#include <cstdio>
#include <iostream>
#include <queue>
#include <string>
#include <vector>

int main() {
    std::vector<std::string> maze;
    for (std::string line; std::cin >> line;) maze.push_back(line);
    int height = maze.size(), width = maze[0].size();
    std::vector<int> steps(height * width, -1);
    std::queue<int> waiting({0});
    for (steps[0] = 0; !waiting.empty(); waiting.pop()) {
        int here = waiting.front();
        for (auto [r, c] : {std::pair{1, 0}, {-1, 0}, {0, 1}, {0, -1}}) {
            int row = here / width + r, column = here % width + c, there = row * width + column;
            if (row < 0 || row >= height || column < 0 || column >= width) continue;
            if (maze[row][column] != '.' || steps[there] >= 0) continue;
            steps[there] = steps[here] + 1;
            waiting.push(there);
        }
    }
    printf("%d\n", steps.back());
}
