"""The only package that contains SQL. Functions take ``tx`` first, and never open or commit; `store.Store` does."""
