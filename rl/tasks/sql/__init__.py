"""Questions that a query answers: databases read and made, schemas, and a source of problems."""
