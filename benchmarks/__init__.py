"""Side by side with what others use: the token counter, and the streaming client (`make bench`, docs/bench.md)."""
