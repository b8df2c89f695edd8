"""SQL, and nothing else is SQL. Functions take ``tx`` first and never open or commit; `engine.Store` does."""
