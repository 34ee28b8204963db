"""`races`: do the streams of a program wait for each other wherever they share memory? Looked at on a CPU."""
