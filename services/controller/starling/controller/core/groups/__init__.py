"""Groups of completions: states and transitions, the group buffer, admission, dispatch, results, and files."""
