"""One module for each trainer that can save by holdfast; none is imported before it is asked for."""
