"""Groups of completions: states and transitions, the train buffer, admission, dispatch, results, and files."""
