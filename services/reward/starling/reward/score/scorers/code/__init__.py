"""The scorer `code`: programs in completions, tests in the rows of data sets, and how outputs are compared."""
