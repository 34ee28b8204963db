"""`races`: check on a CPU that the streams of a program wait for each other wherever they share memory."""
