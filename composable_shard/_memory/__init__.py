"""The pool from which all memory of gathers and reductions comes."""
