"""Our own prompts: templates in three domains whose slots are filled at random. No template serves two splits.

Slots: `{topic}` draws from `SLOTS["topic"]`; `{topic2}` draws again, never the same value within one prompt;
`{n:3-12}` is a whole number in that range, `{n:10-90:5}` one in steps of 5; `{n}` repeats an earlier draw.
`{Topic}` starts with a capital. Code tasks come from `TASKS`, which are divided between the splits as templates are.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from dspark.data.prompts import Opening, Prompt

DOMAINS = ("math", "code", "chat")

SLOTS: dict[str, tuple[str, ...]] = {
    "name": (
        "Amara", "Ben", "Carlos", "Dina", "Elias", "Fatima", "George", "Hana", "Ivan", "Julia", "Kofi", "Lena", "Marco",
        "Nadia", "Oscar", "Priya", "Quentin", "Rosa", "Samir", "Tessa", "Umar", "Vera", "Wei", "Ximena", "Yusuf", "Zoe",
        "Anna", "David", "Grace", "Henry", "Laura", "Peter", "Sophie", "Victor", "Maya", "Noah", "Olga", "Tomas",
    ),
    "goods": (
        "pencils", "notebooks", "apples", "oranges", "muffins", "stickers", "marbles", "candles", "postcards", "tulips",
        "sandwiches", "cupcakes", "T-shirts", "mugs", "seedlings", "bracelets", "lanterns", "comic books", "eggs",
        "jars of honey", "balloons", "kites", "bookmarks", "loaves of bread", "pumpkins", "tickets", "scarves", "cookies",
    ),
    "place": (
        "bakery", "school fair", "farmers market", "bookshop", "garden centre", "library sale", "toy shop", "craft fair",
        "corner shop", "flower stall", "sports club", "museum shop", "street market", "community centre",
    ),
    "container": ("box", "bag", "basket", "crate", "tray", "packet", "carton"),
    "vehicle": ("train", "bus", "truck", "van", "car", "ferry", "coach"),
    "liquid": ("water", "paint", "orange juice", "milk", "fuel", "lemonade", "soup"),
    "activity": (
        "reads", "practises the piano", "jogs", "studies Spanish", "works in the garden", "paints", "swims", "cycles",
        "trains for a race", "draws comics",
    ),
    "animal": ("chickens", "goats", "sheep", "rabbits", "ducks", "horses", "cows", "pigs"),
    "job": (
        "teacher", "nurse", "software engineer", "chef", "electrician", "graphic designer", "journalist", "architect",
        "accountant", "photographer", "librarian", "project manager", "data analyst", "gardener", "carpenter",
        "customer support agent", "research assistant", "social worker", "pharmacist", "tour guide",
    ),
    "topic": (
        "photosynthesis", "black holes", "inflation", "the water cycle", "plate tectonics", "vaccines", "machine learning",
        "the Roman Empire", "jazz music", "renewable energy", "the human heart", "ocean currents", "compound interest",
        "the printing press", "DNA", "democracy", "volcanoes", "sleep", "the Silk Road", "supply and demand",
        "climate change", "the immune system", "electric cars", "gravity", "fermentation", "the Renaissance",
        "coral reefs", "recycling", "artificial intelligence", "the solar system", "magnetism", "probability",
        "the French Revolution", "bees and pollination", "cryptography", "the stock market", "friction", "earthquakes",
        "antibiotics", "Impressionist painting", "the Industrial Revolution", "nutrition labels", "urban planning",
        "evolution by natural selection", "the internet", "nuclear power", "tides", "migration of birds", "Buddhism",
        "the scientific method", "blockchain", "glaciers", "the digestive system", "chess strategy", "soil health",
    ),
    "audience": (
        "a ten-year-old", "a high school student", "a complete beginner", "a busy manager", "my grandmother",
        "someone with no science background", "a curious teenager", "a new employee", "a university student",
    ),
    "hobby": (
        "baking bread", "learning the guitar", "running a half marathon", "growing tomatoes", "learning Japanese",
        "drawing portraits", "playing chess", "woodworking", "meditation", "photography", "knitting", "bird watching",
        "cooking Indian food", "public speaking", "writing a novel", "swimming", "home brewing", "rock climbing",
        "sewing clothes", "keeping a journal", "astronomy", "cycling to work", "calligraphy", "restoring furniture",
    ),
    "city": (
        "Lisbon", "Kyoto", "Cape Town", "Vancouver", "Edinburgh", "Mexico City", "Copenhagen", "Hanoi", "Seville",
        "Marrakesh", "Prague", "Buenos Aires", "Istanbul", "Melbourne", "Reykjavik", "Athens", "Montreal", "Seoul",
    ),
    "country": (
        "Portugal", "Kenya", "Japan", "Peru", "Norway", "Vietnam", "Egypt", "Canada", "Greece", "Brazil", "India",
        "New Zealand", "Morocco", "Poland", "Thailand", "Chile", "Iceland", "Turkey", "South Korea", "Ghana",
    ),
    "problem": (
        "falling asleep at night", "staying focused while working from home", "saving money every month",
        "getting along with a noisy neighbour", "remembering people's names", "waking up early", "eating more vegetables",
        "keeping houseplants alive", "speaking up in meetings", "dealing with exam stress", "using my phone too much",
        "making friends in a new city", "organising a small apartment", "writing my first resume",
        "getting back into exercise", "learning to say no", "preparing for a job interview", "managing a tight deadline",
    ),
    "dish": (
        "vegetable soup", "banana pancakes", "lentil curry", "roast chicken", "a simple pasta salad", "fried rice",
        "apple crumble", "an omelette", "guacamole", "chocolate chip cookies", "tomato sauce", "a black bean chili",
        "homemade pizza dough", "a Greek salad", "mushroom risotto", "oatmeal with fruit", "fish tacos", "hummus",
    ),
    "product": (
        "a reusable water bottle", "a budgeting app", "handmade soap", "a pair of running shoes", "a desk lamp",
        "a language learning app", "an online yoga course", "a portable speaker", "a children's picture book",
        "a coffee subscription", "a smart thermostat", "a bamboo toothbrush", "a travel backpack", "a meal planner",
        "a noise-cancelling headset", "a board game about trains", "an electric bicycle", "a plant watering kit",
    ),
    "thing": (
        "a lighthouse keeper", "a lost dog", "the last library on Earth", "a robot who wants to paint",
        "two rival bakers", "a train that never stops", "a talking clock", "a girl who can hear plants",
        "an astronaut's first night on Mars", "a mysterious letter", "a village without shadows", "a retired detective",
        "a dragon afraid of fire", "a map that keeps changing", "a musician who lost her hearing", "a snowstorm in July",
        "a young fisherman and a whale", "an old bridge", "a forgotten birthday", "the first day of school",
    ),
    "mood": ("funny", "hopeful", "mysterious", "sad", "gentle", "suspenseful", "whimsical", "nostalgic", "uplifting"),
    "language": ("Spanish", "French", "German", "Italian", "Portuguese", "Dutch", "Swedish"),
    "phrase": (
        "Where is the train station?", "I would like a table for two, please.", "The weather is beautiful today.",
        "Could you help me find my keys?", "We are looking forward to meeting you.", "How much does this cost?",
        "My flight leaves at seven in the morning.", "I have been learning this language for a year.",
        "Please send me the report by Friday.", "The museum is closed on Mondays.",
    ),
    "passage": (
        "The city council voted on Tuesday to turn the old railway yard into a public park. Construction will start next "
        "spring and should take about two years. Some residents worry about traffic during the works, but most welcome the "
        "plan because the district has few green spaces.",
        "Bees visit flowers to collect nectar and pollen. While they move from plant to plant they carry pollen with them, "
        "which lets the plants make seeds. Many fruits and vegetables that people eat depend on this. When bee numbers fall, "
        "harvests can shrink as well.",
        "Our team finished the first version of the mobile app last week. Early testers liked the clean design but reported "
        "that the app was slow on older phones. We plan to fix the speed problem before adding new features.",
        "Regular walking is one of the simplest ways to stay healthy. It needs no equipment, can be done almost anywhere, and "
        "is gentle on the joints. Studies suggest that thirty minutes a day lowers the risk of heart disease and improves mood.",
        "The museum's new exhibition shows how maps have changed over five centuries. Visitors can compare hand-drawn sea "
        "charts with satellite images and try to draw a map of their own neighbourhood from memory. Tickets are free for "
        "students on Thursdays.",
        "In the eighteenth century most goods were made by hand at home or in small workshops. The steam engine changed that. "
        "Factories could suddenly produce cloth, tools and paper in large amounts, and people moved to the cities to work in them.",
        "Our coffee shop has served the neighbourhood for twelve years. Last month the rent went up by a third. We do not want "
        "to raise prices, so we are asking regular customers for ideas on how to bring in more visitors in the afternoon.",
        "Learning to cook at home saves money and often leads to a better diet. Beginners should start with five simple recipes "
        "and repeat them until they feel easy. After that, changing one ingredient at a time is a good way to gain confidence.",
        "Water expands when it freezes, which is why ice floats. Most other liquids shrink when they become solid. If ice sank, "
        "lakes would freeze from the bottom up, and fish would have a much harder time surviving the winter.",
        "The new bus line connects the university with the northern suburbs. It runs every ten minutes on weekdays and every "
        "twenty on weekends. In its first month it carried forty thousand passengers, twice as many as expected.",
        "Remote work gives people more freedom to plan their day, but it can also blur the line between work and rest. Managers "
        "who set clear goals and avoid late messages help their teams to stay both productive and healthy.",
        "The red fox lives in forests, fields and, more and more often, cities. It eats almost anything: mice, berries, insects "
        "and leftovers from rubbish bins. Its thick tail helps it to keep its balance and stay warm in winter.",
    ),
    "message": (
        "hey, cant make it tmrw, something came up at work, can we do thursday instead??",
        "The meeting were moved to friday because the room are not available, please informs everybody.",
        "i want to return this jacket its too small and the zipper broke after two days",
        "Send me the files today. I needed them yesterday.",
        "Their going to announce the results on monday, i hope we done good.",
        "We regret that the thing you ordered is not here and we dont know when it comes.",
        "Your presentation was confusing and too long.",
        "she dont like the new schedule because it start to early",
    ),
    "person": (
        "a medieval blacksmith", "a friendly librarian", "a ship's captain", "a time traveller from the year 2300",
        "a strict but kind chess coach", "a detective in 1920s London", "a park ranger", "a grumpy wizard",
        "a street food vendor", "a mission control engineer", "a museum guide", "a wise old turtle",
    ),
    "pair": (
        "tea and coffee", "renting and buying a home", "cats and dogs as pets", "online and classroom learning",
        "electric and petrol cars", "city life and country life", "running and swimming", "books and films",
        "solar and wind power", "freelancing and a salaried job", "butter and olive oil", "laptops and tablets",
        "trains and planes for short trips", "SQL and NoSQL databases", "Python and JavaScript",
    ),
    "fact": (
        "Why is the sky blue", "How do airplanes stay in the air", "Why do leaves change colour in autumn",
        "What causes thunder", "How does a microwave oven heat food", "Why do we dream", "How do fish breathe underwater",
        "What is the difference between weather and climate", "Why does bread rise", "How do computers store numbers",
        "Why is sea water salty", "What makes a rainbow", "How do cats purr", "Why do we have leap years",
        "What is the capital of Australia and why was it chosen", "How far away is the Moon",
        "Who invented the telephone", "How do noise-cancelling headphones work", "Why do onions make us cry",
        "How does a refrigerator keep food cold", "What is dark matter", "How do bridges carry heavy loads",
    ),
    "category": (
        "books about friendship", "healthy snacks", "names for a coffee shop", "rainy day activities for children",
        "gift ideas for a teacher", "ways to save water at home", "icebreaker questions for a team meeting",
        "themes for a birthday party", "titles for a travel blog", "warm-up exercises", "polite ways to end a conversation",
        "ideas for a school science project", "animals that live in the desert", "habits of good students",
        "questions to ask at a job interview", "quick breakfasts", "cheap weekend trips", "slogans for a recycling campaign",
        "musical instruments and how they make sound", "inventions that changed daily life",
    ),
    "claim": (
        "homework should be abolished in primary school", "every city should have free public transport",
        "people should work four days a week", "zoos do more good than harm", "social media makes people lonelier",
        "everyone should learn to code", "museums should be free", "fast food should carry warning labels",
    ),
    "value": (
        "kindness", "patience", "teamwork", "honesty", "curiosity", "courage", "gratitude", "perseverance", "creativity",
    ),
    "season": ("spring", "summer", "autumn", "winter"),
    "event": (
        "a farewell lunch for a colleague", "a neighbourhood clean-up day", "a surprise birthday party",
        "a small book club", "a family reunion", "a school open day", "a charity bake sale", "a weekend hiking trip",
        "a film night", "a workshop on first aid",
    ),
    "structure": (
        "a stack", "a queue", "a linked list", "a binary search tree", "a hash map", "a min-heap", "a graph",
        "a dictionary", "a set", "a tuple",
    ),
    "concept": (
        "recursion", "list comprehensions", "exception handling", "decorators", "generators", "lambda functions",
        "inheritance", "binary search", "the difference between a list and a tuple", "big O notation", "unit testing",
        "virtual environments", "f-strings", "context managers", "regular expressions", "type hints", "dictionaries",
        "sorting with a key function", "mutable default arguments", "slicing", "the global keyword", "closures",
    ),
    "snippet": (
        "def total(values):\n    result = 0\n    for v in values:\n        result = v\n    return result",
        "def is_even(n):\n    if n % 2 = 0:\n        return True\n    return False",
        "def last(items):\n    return items[len(items)]",
        "def greet(name):\nprint('Hello, ' + name)",
        "count = 10\nwhile count > 0:\n    print(count)",
        "def average(xs):\n    return sum(xs) / len(xs)",
        "numbers = [3, 1, 2]\nsorted_numbers = numbers.sort()\nprint(sorted_numbers[0])",
        "def add_item(item, items=[]):\n    items.append(item)\n    return items",
        "for i in range(1, 10):\n    if i % 3 == 0:\n        continue\n    print(i * i)",
        "words = ['sun', 'moon', 'star']\nlengths = {w: len(w) for w in words}\nprint(lengths)",
        "def fact(n):\n    return 1 if n < 2 else n * fact(n - 1)",
        "with open('notes.txt') as f:\n    for line in f:\n        print(line.strip().upper())",
    ),
    "program": (
        "converts temperatures between Celsius and Fahrenheit", "keeps a to-do list in a text file",
        "asks the user for numbers until they type 'done' and prints the average", "simulates rolling two dice",
        "counts how often each word occurs in a text file", "plays rock, paper, scissors against the user",
        "prints a multiplication table", "generates a random password", "reads a CSV file and prints the column names",
        "draws a triangle of stars", "checks whether a website address looks valid", "renames all files in a folder",
    ),
}  # fmt: skip

# (signature, description); the description completes both "a function that ..." and a docstring.
TASKS: dict[str, tuple[tuple[str, str], ...]] = {
    "train": (
        ("count_vowels(text: str) -> int", "returns the number of vowels in a string"),
        ("is_palindrome(text: str) -> bool", "checks whether a string reads the same forwards and backwards"),
        ("factorial(n: int) -> int", "computes the factorial of a non-negative integer"),
        ("fibonacci(n: int) -> list[int]", "returns the first n Fibonacci numbers"),
        ("flatten(nested: list[list[int]]) -> list[int]", "flattens a list of lists into a single list"),
        ("most_common(words: list[str]) -> str", "returns the word that occurs most often in a list"),
        ("second_largest(numbers: list[int]) -> int", "finds the second largest distinct number in a list"),
        ("merge_dicts(a: dict, b: dict) -> dict", "merges two dictionaries, adding up values of shared keys"),
        ("is_prime(n: int) -> bool", "determines whether a number is prime"),
        (
            "running_sum(numbers: list[float]) -> list[float]",
            "returns the cumulative sums of a list of numbers",
        ),
        ("remove_duplicates(items: list) -> list", "removes duplicates from a list while keeping the order"),
        ("celsius_to_fahrenheit(c: float) -> float", "converts a temperature from Celsius to Fahrenheit"),
        ("word_lengths(sentence: str) -> dict[str, int]", "maps each word of a sentence to its length"),
        ("transpose(matrix: list[list[int]]) -> list[list[int]]", "returns the transpose of a matrix"),
        (
            "find_missing(numbers: list[int]) -> int",
            "finds the missing number in a list that should hold 1 to n",
        ),
        ("chunk(items: list, size: int) -> list[list]", "splits a list into chunks of a given size"),
        ("caesar(text: str, shift: int) -> str", "shifts every letter of a text by a number of places"),
        ("sum_of_digits(n: int) -> int", "adds up the digits of an integer"),
        ("longest_word(sentence: str) -> str", "returns the longest word in a sentence"),
        (
            "binary_search(items: list[int], target: int) -> int",
            "returns the index of a value in a sorted list or -1",
        ),
        ("title_case(text: str) -> str", "capitalises the first letter of each word"),
        ("is_leap_year(year: int) -> bool", "tells whether a year is a leap year"),
        ("count_words(text: str) -> dict[str, int]", "counts how often each word occurs in a text"),
        ("rotate(items: list, k: int) -> list", "rotates a list to the right by k positions"),
        ("gcd(a: int, b: int) -> int", "computes the greatest common divisor of two integers"),
        ("filter_even(numbers: list[int]) -> list[int]", "keeps only the even numbers of a list"),
        ("median(numbers: list[float]) -> float", "computes the median of a list of numbers"),
        ("compress(text: str) -> str", "replaces runs of the same character by the character and its count"),
        ("balanced(text: str) -> bool", "checks whether the brackets in a string are balanced"),
        (
            "intersection(a: list[int], b: list[int]) -> list[int]",
            "returns the elements that two lists share",
        ),
        ("invert(mapping: dict) -> dict", "swaps the keys and values of a dictionary"),
        ("parse_time(text: str) -> int", "turns a time such as '02:30' into minutes"),
        (
            "power(base: float, exponent: int) -> float",
            "raises a number to an integer power without using **",
        ),
        ("initials(name: str) -> str", "returns the initials of a full name"),
        ("bubble_sort(numbers: list[int]) -> list[int]", "sorts a list of numbers with bubble sort"),
        ("count_occurrences(items: list, value) -> int", "counts how many times a value appears in a list"),
        ("mean(numbers: list[float]) -> float", "returns the arithmetic mean of a list of numbers"),
        ("reverse_words(sentence: str) -> str", "reverses the order of the words in a sentence"),
        ("clamp(x: float, low: float, high: float) -> float", "limits a number to a given interval"),
        ("group_by_length(words: list[str]) -> dict[int, list[str]]", "groups words by their length"),
    ),
    "validation": (
        ("is_anagram(a: str, b: str) -> bool", "checks whether two words are made of the same letters"),
        ("to_binary(n: int) -> str", "converts a positive integer to its binary representation"),
        (
            "moving_average(xs: list[float], k: int) -> list[float]",
            "computes the moving average over windows of size k",
        ),
        ("starts_with_vowel(words: list[str]) -> list[str]", "keeps the words that begin with a vowel"),
        ("area_of_circle(radius: float) -> float", "returns the area of a circle"),
        ("insert_sorted(items: list[int], x: int) -> list[int]", "inserts a number into a sorted list"),
        ("count_lines(path: str) -> int", "counts the lines of a text file"),
        ("unique_chars(text: str) -> bool", "tells whether all characters of a string are different"),
    ),
    "test": (
        ("perfect_squares(limit: int) -> list[int]", "lists all perfect squares up to a limit"),
        ("sort_by_value(d: dict[str, int]) -> list[str]", "returns the keys of a dictionary sorted by value"),
        ("remove_punctuation(text: str) -> str", "removes all punctuation from a text"),
        (
            "max_difference(numbers: list[int]) -> int",
            "returns the largest difference between two numbers of a list",
        ),
        ("interleave(a: list, b: list) -> list", "alternates the elements of two lists of equal length"),
        ("collatz(n: int) -> list[int]", "returns the Collatz sequence that starts at n"),
        ("count_inversions(xs: list[int]) -> int", "counts the pairs of elements that are out of order"),
        ("roman_numeral(n: int) -> str", "converts a number between 1 and 3999 to a Roman numeral"),
        ("dot_product(a: list[float], b: list[float]) -> float", "computes the dot product of two vectors"),
        ("snake_case(name: str) -> str", "converts a camelCase name to snake_case"),
        ("lcm(a: int, b: int) -> int", "computes the least common multiple of two integers"),
        ("histogram(values: list[int]) -> str", "draws a text histogram with one line per value"),
    ),
}

_REASONING = (
    "", "", "", " Please reason step by step.", " Think step by step and give the final answer at the end.",
    " Show your work.", " Explain each step.", "\nPlease reason step by step, and finish with the answer on its own line.",
    " Solve it step by step.", " What is the answer?", " Walk me through the solution.",
)  # fmt: skip

MATH: dict[str, tuple[str, ...]] = {
    "train": (
        "{name} buys {n:3-12} {goods} at the {place} for ${m:2-9} each and pays with a $100 bill. How much change does {name} get?",
        "A {container} holds {n:6-24} {goods}. {name} has {m:3-15} full boxes and gives away {k:5-30} {goods}. How many {goods} are left?",
        "{name} {activity} for {n:15-60:5} minutes on weekdays and {m:30-120:10} minutes on each day of the weekend. How many minutes is that in one week? How many hours?",
        "A {vehicle} travels at {n:40-110:5} km per hour for {m:2-6} hours, then at {k:30-80:10} km per hour for {j:1-4} more hours. How far does it go in total?",
        "{name} has {n:20-90} {goods}. {name2} has {m:2-5} times as many. How many {goods} do they have together?",
        "There are {n:12-60} {animal} and {m:10-40} hens on a farm. If {k:3-9} of the {animal} are sold, how many animals remain?",
        "A recipe needs {n:2-6} cups of flour for {m:8-24:4} cookies. How many cups are needed for {k:48-120:24} cookies?",
        "{name} earns ${n:10-30} an hour and works {m:4-8} hours a day, {k:3-6} days a week. How much does {name} earn in {j:2-8} weeks?",
        "The {place} sells {goods} for ${n:3-15} each. On Monday it sold {m:10-40}, on Tuesday {k:2-3} times as many. What was the total income?",
        "{name} reads {n:12-45} pages a day. The book has {m:200-600:20} pages. How many days does it take to finish the book?",
        "A tank contains {n:100-400:20} litres of {liquid}. Every hour {m:5-15} litres flow out and {k:1-4} litres are added. How much is in the tank after {j:3-12} hours?",
        "{n:3-8} friends share the cost of a meal. The food costs ${m:40-160:4}, and they leave a tip of {k:10-20:5} percent. How much does each of them pay?",
        "{name} saves ${n:5-40:5} every week. After {m:6-20} weeks {name} spends ${k:20-90:10} on {goods}. How much money is left?",
        "A jacket costs ${n:40-200:10}. It is discounted by {m:10-50:5} percent, and then a tax of {k:5-10} percent is added. What is the final price?",
        "In a class of {n:20-36:2} students, half play football, and {m:3-9} students play neither football nor tennis. Everyone else plays tennis. How many play tennis?",
        "The sum of two numbers is {n:20-90} and their difference is {m:2-18:2}. What are the two numbers?",
        "What is {n:12-98} times {m:12-98}?",
        "Solve for x: {n:2-9}x + {m:3-40} = {k:50-120}.",
        "Find the area and the perimeter of a rectangle that is {n:4-30} cm long and {m:3-20} cm wide.",
        "What is {n:5-95:5} percent of {m:40-900:20}?",
        "{name} is {n:4-12} years older than {name2}. In {m:2-10} years the sum of their ages will be {k:50-90:2}. How old are they now?",
        "A triangle has angles of {n:30-80:5} and {m:20-70:5} degrees. How large is the third angle?",
        "Compute {n:2-9} + {m:3-12} * ({k:10-30} - {j:2-9}).",
        "{name} cuts a ribbon of {n:120-400:20} cm into pieces of {m:10-40:10} cm. How many cuts are needed?",
        "A {vehicle} leaves at {n:6-11}:15 and arrives {m:2-9} hours and {k:10-50:5} minutes later. At what time does it arrive?",
        "The average of four numbers is {n:10-40}. Three of them are {m:5-20}, {k:12-30} and {j:8-25}. What is the fourth number?",
        "Simplify the fraction {n:12-96:12}/{m:18-126:18}.",
        "{name} plants {n:4-15} rows of {m:6-20} tulips. One in {k:2-5} does not grow. How many tulips grow?",
        "What is the probability of rolling a total of {n:4-10} with two fair dice?",
        "How many different ways are there to choose {n:2-4} people from a group of {m:5-10}?",
        "Can you explain how to add fractions with different denominators, using {n:1-3}/{m:4-7} and {k:1-4}/{j:8-9} as an example?",
        "A number is multiplied by {n:2-8}, then {m:3-20} is subtracted, and the result is {k:30-100}. What was the number?",
    ),
    "validation": (
        "{name} has {n:5-20} coins of 50 cents and {m:4-30} coins of 20 cents. How many dollars is that altogether?",
        "A gardener needs {n:2-5} bags of soil for every {m:3-9} square metres. How many bags are needed for {k:30-90:15} square metres?",
        "{name} walks {n:2-6} km to school and back every day. How far does {name} walk in {m:3-12} school weeks of five days?",
        "A shop had {n:80-240:10} {goods}. It sold a quarter of them in the morning and {m:5-25} in the afternoon. How many are left?",
        "If {n:2-6} machines make {m:20-90:10} parts in an hour, how many parts do {k:7-15} machines make in {j:2-5} hours?",
        "Expand and simplify ({n:2-7}x + {m:1-9})(x - {k:1-8}).",
        "The perimeter of a square is {n:16-100:4} cm. What is its area?",
        "Which is larger, {n:3-7}/{m:8-11} or {k:2-5}/{j:6-9}? Explain how you know.",
    ),
    "test": (
        "{name} and {name2} pick {goods}. {name} picks {n:15-60} and {name2} picks {m:4-14} fewer. They sell all of them for ${k:1-4} each. How much money do they make?",
        "A cinema has {n:8-20} rows with {m:10-24} seats. {k:20-90:5} seats are empty. How many people are watching the film?",
        "A phone plan costs ${n:10-30:5} a month plus ${m:1-3} for every gigabyte above {k:2-6}. {name} uses {j:8-14} gigabytes. How high is the bill?",
        "{name} bakes {n:3-9} trays of {m:10-16:2} cookies, eats {k:2-8} and packs the rest into bags of six. How many bags can be filled completely?",
        "Two {vehicle}s start {n:200-500:50} km apart and drive towards each other at {m:40-60:10} and {k:50-90:10} km per hour. After how many hours do they meet?",
        "Find all values of x with x^2 - {n:5-9}x + {m:4-6} = 0.",
        "A cube has edges of {n:2-12} cm. What are its volume and its surface area?",
        "A sum of ${n:200-900:100} earns {m:2-6} percent simple interest a year. How much is it worth after {k:2-8} years?",
        "The ratio of red to blue marbles is {n:2-5} to {m:3-7}, and there are {k:20-60:10} red marbles. How many marbles are there in total?",
        "What is the next number in the sequence {n:2-5}, {m:6-9}, {k:10-13}, {j:14-17}? Explain your rule.",
    ),
}

CODE: dict[str, tuple[str, ...]] = {
    "train": (
        "Write a Python function that {task}.",
        "Write a function `{signature}` in Python that {task}.",
        'Complete this Python function:\n\n```python\ndef {signature}:\n    """{Task}."""\n```',
        'Please implement the following function and explain how it works.\n\ndef {signature}:\n    """\n    {Task}.\n    """',
        "I need a short Python function called {function} that {task}. Include an example call.",
        "How do I write Python code that {task}? Give me a function and a short explanation.",
        'def {signature}:\n    """{Task}."""\n\nFill in the body.',
        "Write a function that {task}, then write three assert statements that test it.",
        "Implement {function} in Python. It {task}. Handle empty input gracefully.",
        "Give me a Python one-liner or a short function that {task}.",
        'Here is a docstring: "{Task}." Write the Python function `{signature}` to match it.',
        "Write a JavaScript function that {task}.",
        "What does this Python code do?\n\n```python\n{snippet}\n```",
        "Is there a bug in this code? If so, fix it.\n\n```python\n{snippet}\n```",
        "Explain {concept} in Python with a simple example.",
        "What is {concept} and when should I use it in Python?",
        "Show me how to use {structure} in Python.",
        "Write a Python program that {program}.",
        "Write a Python class that represents {structure}, with methods to add and remove elements.",
        "Add comments to this code so that a beginner can follow it:\n\n{snippet}",
        "Write a SQL query that returns the names of all customers who placed more than {n:2-20} orders.",
        "How can I read a JSON file in Python and print every key at the top level?",
        "Write a bash command that finds all files larger than {n:5-500:5} megabytes in a folder.",
        "Explain the difference between {concept} and {concept2} for a new Python programmer.",
        "Rewrite this code in a more readable way:\n\n```python\n{snippet}\n```",
    ),
    "validation": (
        "Create a Python function named `{function}`. It {task}. Use a docstring and type hints.",
        "```python\ndef {signature}:\n    # {Task}\n    ...\n```\nReplace the dots with working code.",
        "Can you code something in Python that {task}? Please keep it short.",
        "Write unit tests for a Python function `{signature}` that {task}.",
        "Predict the output of this program and explain why:\n\n{snippet}",
        "Give me a tutorial of a few paragraphs on {concept} in Python.",
        "Write a small command line tool in Python that {program}. Use functions.",
    ),
    "test": (
        "You are given this task: write Python code that {task}. The function must be called {function}.",
        'from typing import Any\n\n\ndef {signature}:\n    """{Task}.\n    """\n',
        "Solve this programming exercise in Python. Define `{signature}`. It {task}. Return only the code.",
        "Write the function {function} twice: once with a loop and once with built-in functions. It {task}.",
        "Review the following code and suggest two improvements:\n\n```python\n{snippet}\n```",
        "I keep hearing about {concept} in programming. What is it, and can you show me code?",
        "How would you store a phone book in Python: with {structure} or {structure2}? Show example code.",
        "Help me write a script that {program}.",
    ),
}

CHAT: dict[str, tuple[str, ...]] = {
    "train": (
        "Explain {topic} to {audience}.",
        "What is {topic} and why does it matter?",
        "Write a short essay about {topic}.",
        "Give me five interesting facts about {topic}.",
        "Summarize the following text in one or two sentences.\n\n{passage}",
        "Rewrite this message so that it sounds polite and professional:\n\n{message}",
        "Correct the grammar and spelling: \"{message}\"",
        "I struggle with {problem}. What can I do?",
        "Give me three practical tips for {problem}.",
        "I want to get started with {hobby}. Where should I begin?",
        "Make a one-week plan for a beginner who is interested in {hobby}.",
        "Write a {mood} short story about {thing}.",
        "Write a poem about {season} that feels {mood}.",
        "List ten {category}.",
        "Suggest some {category} and briefly explain each one.",
        "{fact}?",
        "{fact}? Please explain it simply.",
        "Compare {pair}. What are the advantages and disadvantages of each?",
        "Plan a three-day trip to {city} for a family with two children.",
        "What should I see and eat in {city}?",
        "How do I make {dish}? List the ingredients and the steps.",
        "Write a product description for {product}.",
        "Write an advertisement for {product} in a {mood} tone.",
        "Pretend you are {person} and introduce yourself.",
        "Act as {person}. I ask you: what is the most important lesson you have learned?",
        "Translate into {language}: \"{phrase}\"",
        "Write an email to my manager asking for {n:1-5} days off next month.",
        "Write a cover letter for a position as a {job}.",
        "What does a {job} do on a typical day?",
        "Which skills do I need to become a {job}?",
        "Write an invitation to {event}.",
        "Do you think that {claim}? Give arguments on both sides.",
        "Write a dialogue between a {job} and a customer who has a complaint.",
        "Read the text and answer the question.\n\nText: {passage}\n\nQuestion: What is the main point?",
        "Turn this paragraph into a list of bullet points:\n\n{passage}",
        "What are some traditions and festivals in {country}?",
        "Tell me about the history and culture of {country}.",
        "Write a motivational message about {value}.",
        "What is a good definition of {value}? Give an example from everyday life.",
        "Write three quiz questions about {topic}, with answers.",
        "Hi! Can you help me with {problem}?",
        "Describe {topic} in exactly three sentences.",
        "What are common misunderstandings about {topic}?",
        "Rewrite this text in simpler words:\n\n{passage}",
    ),
    "validation": (
        "I have to give a two-minute talk on {topic}. Can you write it?",
        "Shorten this text to half its length:\n\n{passage}",
        "My friend needs advice on {problem}. What should I tell them?",
        "Come up with a plot for a {mood} film about {thing}.",
        "Give me a checklist for organising {event}.",
        "Brainstorm {category}.",
        "What would {person} say about {topic}?",
        "Should I choose a career as a {job} or as a {job2}?",
        "Thank-you note: write one to a neighbour who showed me how to make {dish}.",
    ),
    "test": (
        "Create a beginner's guide to {topic} with headings.",
        "Make this sound more friendly: \"{message}\"",
        "Write a letter from {person} to a friend about {thing}.",
        "What are the pros and cons of moving to {city} as a {job}?",
        "Give a title to this text and explain your choice:\n\n{passage}",
        "How long does it take to get good at {hobby}, and how should I practise?",
        "Write a speech for {event}, about {value}.",
        "I'm a teacher. Design a 30-minute lesson on {topic} for {audience}.",
        "What should I cook tonight? I thought of {dish} or {dish2}.",
        "Persuade me that {claim}.",
    ),
}  # fmt: skip

TEMPLATES = {"math": MATH, "code": CODE, "chat": CHAT}

# First words of a user turn, for a verifier that writes the rest. For training only: what follows is not ours to keep apart.
OPENINGS: dict[str, tuple[str, ...]] = {
    "math": (
        "{name} has {n:3-60} {goods}", "{name} buys {n:2-12} {goods}", "{name} wants to buy", "A {place} sells {goods} for ${n:2-20}",
        "There are {n:8-90} {animal}", "A {vehicle} travels {n:40-400:10}", "{name} and {name2} share", "{name} earns ${n:8-40} an hour",
        "A {container} holds {n:4-40} {goods}", "{name} is {n:5-60} years old", "In a class of {n:15-40} students,",
        "A {job} works {n:3-10} hours", "If it takes {name} {n:2-40} minutes", "At the {place}, {goods} cost", "{name} spent ${n:5-200:5}",
        "{name} {activity} for {n:15-60:5} minutes", "{name} is making", "{name} bakes", "A store offers", "{name} saves ${n:5-90:5}",
        "{name} needs {n:2-30}", "Half of the {goods}", "The price of a", "{name} has twice as many", "A tank holds {n:20-900:20} liters",
        "Each {job} at the", "Over the weekend, {name}", "Find the sum of", "Find all solutions to the equation", "Solve for $x$:",
        "What is the value of $", "Let $f(x) =", "Simplify $", "Evaluate $", "Compute $", "How many positive integers",
        "What is the probability that", "The area of a triangle", "A rectangle has a length of {n:4-30}", "What is the remainder when",
        "The sum of two numbers is {n:10-90}", "Calculate the average of", "A circle has a radius of {n:2-20}",
        "What percent of {n:40-900:10}", "Suppose that $x", "What is the least common multiple of", "Factor the polynomial",
        "If $x +", "Let $a$ and $b$ be", "A bag contains {n:2-20} red marbles", "How many ways are there to", "The function $f",
    ),
    "code": (
        "Write a Python function that", "Write a Python function to", "Write a function to find", "Write a function to check whether",
        "Write a function that takes a list of", "Write a function to remove", "Write a function to count", "Write a function to sort",
        "Write a function that returns", "Write a function to calculate", "Write a function to convert", "Write a Python program that",
        "Implement a function that", "Write a solution to the following problem:\n\n```python\ndef",
        "Complete the following Python function:\n\n```python\ndef", "Complete this function:\n\n```python\nfrom typing import List\n\n\ndef",
        "Given a string,", "Given a list of integers,", "Given an array of numbers,", "Write a Python class", "Write a JavaScript function",
        "Create a SQL query", "How can I use Python to", "Explain what this code does:\n\n```python\n", "Fix the bug in this code:\n\n```python\n",
        "Write a regular expression", "Implement {structure} in Python", "Write a script that", "Write a C++ program", "Using Python,",
        "Write unit tests for", "Explain {concept} in Python", "Create a Python function called", "I have a list of",
    ),
    "chat": (
        "Write an email", "Write a short story about", "Explain {topic}", "Compose a", "Imagine you are", "What are", "Why do", "How does",
        "Describe", "Summarize this text:\n\n", "Rewrite the following", "I'm a {job} and", "Can you help me", "What is the difference between",
        "Give me", "Suggest", "Write a poem about", "Compare", "You are a {job}.", "Create a", "Draft a", "Tell me about", "Extract the",
        "Write a blog post about", "Act as a {job}", "Design a", "Answer the following question:", "Analyze", "Provide a", "Which", "Who",
        "Pretend to be", "I want to", "My friend", "Is it", "Should I", "Write a speech", "List", "Edit the following paragraph", "Develop a plan",
        "What would happen if", "Discuss", "Prepare", "How do I", "Given the following", "Make a",
    ),
}  # fmt: skip

_SLOT = re.compile(r"\{([A-Za-z]+)(\d?)(?::(\d+)-(\d+)(?::(\d+))?)?\}")

# "a" before a vowel that a slot brought; "one-week" and the like keep theirs.
_ARTICLE = re.compile(r"\b([Aa]) (?=[aeio](?!ne\b))")


# What half of the opened mathematics problems end with: the customary instruction of evaluation sets (Qwen2.5-Math).
_BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def opening_of(index: int, *, domains: Sequence[str], seed: int) -> Opening:
    """The opening of draw `index`; domains take turns. Raises ValueError for an unknown domain."""
    _check_domains(domains)
    rng = random.Random(f"{seed}/opening/{index}")
    domain = domains[index % len(domains)]
    text = fill(rng.choice(OPENINGS[domain]), split="train", rng=rng)
    ending = "" if domain != "math" else _BOXED if rng.random() < 0.5 else rng.choice(_REASONING)
    return Opening(text=text, domain=domain, ending=ending)


def template_prompts(*, counts: dict[str, int], domains: Sequence[str], seed: int) -> list[Prompt]:
    """Distinct single-turn prompts, `counts[split]` a split, shared evenly between `domains` and their templates.

    The same arguments give the same prompts; a larger count begins with the prompts of a smaller one.

    Raises:
        ValueError: for an unknown split or domain, or when the templates cannot give that many distinct prompts.
    """
    _check_domains(domains)
    if unknown := sorted(set(counts) - set(TASKS)):
        raise ValueError(f"unknown splits {unknown} in counts; expected some of {tuple(TASKS)}.")
    prompts: list[Prompt] = []
    for split, count in counts.items():
        for d, domain in enumerate(domains):
            wanted = count // len(domains) + (d < count % len(domains))
            prompts += _domain_prompts(domain, split, wanted, random.Random(f"{seed}/{split}/{domain}"))
    return prompts


def _check_domains(domains: Sequence[str]) -> None:
    if unknown := sorted(set(domains) - set(DOMAINS)):
        raise ValueError(f"unknown prompt domains {unknown}; expected some of {DOMAINS}.")


def _domain_prompts(domain: str, split: str, count: int, rng: random.Random) -> list[Prompt]:
    templates = TEMPLATES[domain][split]
    texts: dict[str, None] = {}
    attempt = streak = 0
    while len(texts) < count:
        text = fill(templates[attempt % len(templates)], split=split, rng=rng)
        if domain == "math":
            text += rng.choice(_REASONING)
        attempt += 1
        streak = streak + 1 if text in texts else 0
        if streak > 20 * len(templates):
            raise ValueError(
                f"the {domain} templates of split {split!r} give {len(texts)} distinct prompts, {count} were asked for."
            )
        texts[text] = None
    return [Prompt.from_turns([text], domain=domain, split=split) for text in texts]


def fill(template: str, *, split: str, rng: random.Random) -> str:
    """The template with every slot filled; task slots draw from the split's own tasks."""
    signature, task = rng.choice(TASKS[split])
    values = {"signature": signature, "task": task, "function": signature.split("(")[0]}
    drawn: dict[str, list[str]] = {}

    def value(match: re.Match[str]) -> str:
        name, digit, low, high, step = match.groups()
        key = name.lower() + digit
        if key not in values:
            if low is not None:
                values[key] = str(rng.randrange(int(low), int(high) + 1, int(step or 1)))
            else:
                used = drawn.setdefault(name.lower(), [])
                used.append(rng.choice([v for v in SLOTS[name.lower()] if v not in used]))
                values[key] = used[-1]
        text = values[key]
        return text[0].upper() + text[1:] if name[0].isupper() else text

    return _ARTICLE.sub(r"\1n ", _SLOT.sub(value, template))
