"""What happens in a step, as data: the record of one, schedules, memory and times predicted from them."""
