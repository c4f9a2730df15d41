"""Training: one loop that reads like the paper's Algorithm 1, and what it needs beside it."""
