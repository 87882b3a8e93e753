"""Episodes: the token sequence of one trajectory, its turns and branches."""
