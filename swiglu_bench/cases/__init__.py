"""What is asked for: shapes, cases, costs by arithmetic, implementations as data. No torch."""
