"""Single statements that do what the other rooms do in several, with the same result. `runner.lanes` chooses them."""
