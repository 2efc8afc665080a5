"""What treeshard costs, beside what others do. Every table is a command."""
