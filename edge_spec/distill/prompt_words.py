"""The words that the shipped prompts are made of: subjects, tasks, people, and small sentences in a few languages."""

from __future__ import annotations

SUBJECTS = (
    """
photosynthesis|gravity|the tides|vaccines|inflation|compound interest|plate tectonics|black holes|the water cycle
how bread rises|the ozone layer|DNA|evolution|antibiotics|the greenhouse effect|nuclear fission|electric motors
solar panels|batteries|lightning|rainbows|earthquakes|volcanoes|glaciers|coral reefs|the nitrogen cycle|fermentation
the human heart|the immune system|memory|sleep|dreams|allergies|muscles|the liver|blood types|the eye|hearing
supply and demand|central banks|taxes|insurance|mortgages|stock markets|trade deficits|minimum wages|monopolies
democracy|the separation of powers|constitutions|elections|the rule of law|human rights|federalism|patents|copyright
the Roman Empire|the Silk Road|the printing press|the Industrial Revolution|the Renaissance|the French Revolution
the Black Death|the fall of the Berlin Wall|the first moon landing|ancient Egypt|the Vikings|the Ottoman Empire
recursion|binary search|hash tables|encryption|public keys|compilers|operating systems|databases|the internet|caching
machine learning|neural networks|version control|unit tests|garbage collection|threads|virtual memory
regular expressions
prime numbers|probability|fractions|logarithms|the Pythagorean theorem|calculus|matrices|statistics|infinity|graphs
jazz|opera|impressionism|the novel|haiku|architecture|photography|film editing|theatre|ceramics|typography|ballet
chess|cycling|marathon running|swimming|football|yoga|climbing|rowing|sailing|skiing|table tennis|fencing
bees|whales|octopuses|migrating birds|ants|wolves|mushrooms|trees in winter|bats|spiders|sharks|penguins|dinosaurs
tea|coffee|cheese|chocolate|olive oil|spices|sourdough|rice|potatoes|honey|salt|sugar|wine|soup
urban planning|public transport|bridges|tunnels|lighthouses|canals|windmills|recycling|composting|tap water
loneliness|friendship|motivation|habits|procrastination|stress|curiosity|honesty|fairness|courage|patience|humour
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

TASKS = (
    """
bake a loaf of bread|repair a bicycle tyre|learn a new language|write a letter of complaint|prepare for a job interview
plan a small garden|save money every month|start running|cook rice properly|clean a keyboard|choose a used car
organise a birthday party|pack for a week in the mountains|give a short speech|learn to play the guitar
move to a new flat|keep houseplants alive|train a puppy|back up a computer|make a budget|read more books|sleep better
set up a home office|write a short story|study for an exam|paint a room|remove a coffee stain|make a paper plane
brew good coffee|sharpen a kitchen knife|build a bookshelf|fix a dripping tap|grow tomatoes on a balcony
ask for a pay rise|settle an argument between friends|teach a child to swim|make soup from leftovers|sew on a button
find a flat in a big city|take better photos|write clear e-mails|run a productive meeting|negotiate a price
start a book club|reduce food waste|lower an electricity bill|choose a laptop|protect an online account|learn chess
write a cover letter|plan a train journey|remember names|stop biting nails|keep a diary|make yoghurt|change a light bulb
prepare a presentation|care for leather shoes|plan meals for a week|read a map|give useful feedback|practise mindfulness
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

PEOPLE = (
    """
a nurse|a fisherman|a young teacher|an old clockmaker|a bus driver|two sisters|a retired pilot|a baker
a lighthouse keeper
a violinist|a shy student|a mayor|a gardener|a detective|a librarian|a robot|an astronaut|a shepherd|a chess player
a painter|a postman|a cook|twin brothers|a geologist|a translator|a ferry captain|a piano tuner|a night watchman
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

PLACES = (
    """
a village by the sea|a crowded train|an empty museum|a mountain hut|a space station|a small bakery
an island without a name
a city under snow|an old theatre|a desert road|a hospital at night|a library|a harbour|a school in summer
a market square
a forest in autumn|a submarine|a flooded town|a hotel that is about to close|a rooftop|a kitchen|a railway station
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

EVENTS = (
    """
finds a letter that was never sent|loses a key|hears a song from long ago|misses the last train|must tell the truth
meets an old rival|discovers a hidden door|makes a promise|has one hour left|receives a strange gift|gets lost
saves a stranger|has to choose between two jobs|learns a secret|waits for the rain to stop|breaks a rule|says goodbye
builds something that nobody has asked for|hides from a storm|wins a prize by mistake|forgets an important date
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

ROLES = (
    """
a ship's doctor in 1790|a patient maths teacher|a travel guide in Lisbon|a strict editor|a medieval blacksmith
a friendly librarian|an experienced gardener|a job interviewer|a stand-up comedian|a football coach|a museum guide
a detective in a small town|a dragon who likes books|a chef in a busy kitchen|a science journalist|a kind grandmother
a philosopher of ancient Athens|a customer service agent|a fitness trainer|a judge at a baking contest
a tour guide on Mars
a career adviser|a weather presenter|a wise old tree|a nervous wizard|a startup founder|a historian|a radio host
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

ROLE_QUESTIONS = (
    """
What did you do this morning?|What advice would you give a beginner?|Tell me about the worst day of your work.
What do people misunderstand about you?|Introduce yourself in a few sentences.|What are you most proud of?
I am bored. What should I do today?|How did you learn what you know?|Which tool could you not do without?
A stranger knocks at your door. What do you say?|What would you change if you could?|I made a mistake. Please help me.
Explain to me what you do, as if I had never heard of it.|What is the secret of your success?|What worries you at night?
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

CODE_TASKS = (
    """
reverses a string|checks whether a number is prime|counts the words in a text|merges two sorted lists
finds the largest element of a list|removes duplicates from a list and keeps the order
computes the factorial of a number
returns the n-th Fibonacci number|checks whether a word is a palindrome|converts Celsius to Fahrenheit
sorts a list of people by age|groups words by their first letter|flattens a nested list|counts vowels in a sentence
validates an e-mail address|parses a line of comma-separated values|computes the average of a list of numbers
finds all pairs that add up to a given sum|rotates a list by k places|transposes a matrix
computes the greatest common divisor
checks whether brackets are balanced|reads a file and prints its longest line|replaces every tab with four spaces
converts a number to binary|finds the second largest number|implements a stack|implements a queue with two stacks
searches a sorted list|counts how often each letter occurs|capitalises every word|checks whether two words are anagrams
splits a list into chunks of n|computes the days between two dates|draws a triangle of stars|shuffles a deck of cards
retries a function up to three times|caches the results of a slow function|limits a number to a range
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

LANGUAGES = ("Python", "Python", "Python", "JavaScript", "Java", "C", "C++", "Go", "Rust", "TypeScript", "SQL", "Bash")

# Each with something wrong or something to explain.
SNIPPETS = (
    "def mean(values):\n    total = 0\n    for value in values:\n        total += value\n    return total / len(value)",
    "def last(items):\n    return items[len(items)]",
    "for i in range(1, 10):\n    if i % 2 = 0:\n        print(i)",
    "def add(item, items=[]):\n    items.append(item)\n    return items",
    "def factorial(n):\n    return n * factorial(n - 1)",
    "const total = prices.reduce((sum, price) => sum + price);\nconsole.log('Total: ' + total.toFixed(2));",
    "let count = 0;\nwhile (count < 5) {\n  console.log(count);\n}",
    "int max(int a, int b) {\n  if (a > b) return a;\n}",
    "SELECT name, COUNT(*) FROM orders WHERE COUNT(*) > 3 GROUP BY name;",
    "words = text.split()\nlongest = max(words, key=len)\nprint(longest)",
    "squares = {n: n * n for n in range(10) if n % 3 == 0}",
    "with open('notes.txt') as file:\n    lines = [line.strip() for line in file if line.strip()]",
    "def is_even(n):\n    if n % 2 == 0:\n        return 'True'\n    else:\n        return 'False'",
    "function greet(name) {\n  return `Hello, ${nam}!`;\n}",
    "def find(items, wanted):\n    for index in range(len(items)):\n        if items[index] == wanted:\n"
    "            return index\n        return -1",
    "public static boolean same(String a, String b) {\n    return a == b;\n}",
    "for file in $(ls *.txt); do\n  wc -l $file\ndone",
    "a, b = 0, 1\nwhile a < 100:\n    print(a)\n    a, b = b, a + b",
    "from collections import Counter\nprint(Counter('mississippi').most_common(2))",
    "func sum(numbers []int) int {\n\tfor _, n := range numbers {\n\t\ttotal += n\n\t}\n\treturn total\n}",
)

NAMES = (
    """
Anna|Ben|Clara|David|Elif|Farid|Greta|Hugo|Ines|Jonas
Karim|Lena|Marta|Nils|Olga|Pedro|Rosa|Samir|Tara|Viktor
""".replace("\n", "|")
    .strip("|")
    .split("|")
)
GOODS = (
    """
apples|pencils|tickets|notebooks|eggs|cups|bottles|stamps|marbles|books
candles|buttons|oranges|chairs
""".replace("\n", "|")
    .strip("|")
    .split("|")
)

# Subjects, what they do, and where or when: any three make a sentence.
CLAUSES = {
    "German": (
        "Die Lehrerin|Mein Bruder|Der alte Mann|Unsere Nachbarin|Das Kind|Die Firma|Der Bürgermeister|Meine Freundin",
        "sucht seit Tagen einen Schlüssel|hat ein kleines Haus gekauft|spielt gern Klavier|wartet auf den Zug"
        "|möchte ein neues Fahrrad|liest jeden Tag die Zeitung|hat die Prüfung bestanden|backt einen Apfelkuchen"
        "|spricht mit den Gästen|verkauft frisches Gemüse",
        "in der Stadt|am Sonntagmorgen|trotz des schlechten Wetters|neben dem Bahnhof|seit dem letzten Winter"
        "|mit großer Freude|in einem Dorf am See|vor dem Abendessen",
    ),
    "French": (
        "Ma sœur|Le professeur|Notre voisin|La vieille dame|Le maire|Mon ami|L'enfant|La boulangère",
        "cherche ses lunettes|a acheté une petite maison|joue du violon|attend le train|veut apprendre le chinois"
        "|lit le journal|prépare un gâteau aux pommes|parle avec les clients|vend des légumes frais|a perdu son billet",
        "dans la rue|le dimanche matin|malgré la pluie|près de la gare|depuis l'hiver dernier|avec beaucoup de plaisir"
        "|dans un village au bord du lac|avant le dîner",
    ),
    "Spanish": (
        "Mi hermana|El profesor|Nuestro vecino|La señora mayor|El alcalde|Mi amigo|El niño|La panadera",
        "busca sus gafas|ha comprado una casa pequeña|toca la guitarra|espera el tren|quiere aprender inglés"
        "|lee el periódico|prepara una tarta de manzana|habla con los clientes"
        "|vende verduras frescas|ha perdido su billete",
        "en la calle|los domingos por la mañana|a pesar de la lluvia|cerca de la estación|desde el invierno pasado"
        "|con mucho gusto|en un pueblo junto al lago|antes de la cena",
    ),
    "Italian": (
        "Mia sorella|Il professore|Il nostro vicino|La signora anziana|Il sindaco|Il mio amico|Il bambino|La fornaia",
        "cerca gli occhiali|ha comprato una piccola casa|suona il pianoforte|aspetta il treno|vuole imparare il tedesco"
        "|legge il giornale|prepara una torta di mele|parla con i clienti|vende verdure fresche|ha perso il biglietto",
        "per strada|la domenica mattina|nonostante la pioggia|vicino alla stazione"
        "|dall'inverno scorso|con molto piacere"
        "|in un paese sul lago|prima di cena",
    ),
}
ENGLISH = (
    "My sister|The teacher|Our neighbour|The old lady|The mayor|My friend|The child|The baker",
    "is looking for her glasses|has bought a small house|plays the piano|is waiting for the train|wants to learn German"
    "|reads the newspaper|is baking an apple pie|talks to the guests|sells fresh vegetables|has lost a ticket",
    "in the street|on Sunday mornings|despite the rain|near the station|since last winter|with great pleasure"
    "|in a village by the lake|before dinner",
)

# Small passages: each sentence may follow the one before; names in braces are filled in once for a passage.
PASSAGES = (
    (
        "{town} lies on the river {river}, about {n} kilometres from the coast.",
        "For centuries the town lived from {trade}, and its market was known far beyond the valley.",
        "In {year} the railway arrived, and within ten years the population had doubled.",
        "A flood destroyed the old bridge in {later}; the new one, built of steel, is still in use.",
        "Today most people work in the hospital, the schools and a factory that makes {product}.",
        "Every {month} a festival with music and lanterns draws about {many} visitors.",
        "The town council plans to turn the old station into a library, but the money has not been found yet.",
    ),
    (
        "{person} founded {company} in {year}, together with two friends, in a garage in {town}.",
        "At first the firm repaired radios; its first product of its own was a line of {product}.",
        "By {later} it had {n} employees and sold to {few} countries.",
        "A warehouse fire in the following {month} nearly ended the story, since little was insured.",
        "The founders sold their houses to pay the suppliers, and the customers stayed.",
        "Last year {company} reported a turnover of {few} million euros, a little more than the year before.",
        "{person} has now handed the management to a daughter, who wants to build a second plant near {town}.",
    ),
    (
        "Researchers from {town} have watched a colony of {animal} for {few} years.",
        "They fitted {n} animals with small transmitters and recorded their movements day and night.",
        "The animals travel much further than had been thought: up to {n2} kilometres in one night.",
        "In dry years they leave the valley in {month} and return only after the first rain.",
        "{person}, who leads the study, believes that street lights confuse the young ones.",
        "When the town of {town} switched off half of its lamps, the losses fell by a third.",
        "The team warns that {few} years are too few to speak of a trend, and asks for more observers.",
    ),
    (
        "The {town} city library will close for repairs from the first of {month}.",
        "The roof, built in {year}, leaks in several places, and about {many} books have had to be moved.",
        "During the work, which is to take {few} months, readers can use a reading room in the town hall.",
        "Books can be returned at any branch, and no fees will be charged for late returns.",
        "{person}, the director, said the old reading lamps would be kept and fitted with new bulbs.",
        "The costs of {few} million euros are shared by the city and a foundation.",
        "A café and a room for children are to open together with the new building.",
    ),
    (
        "Dear all, the meeting on the {river} project has been moved to the {day} of {month}.",
        "We will meet in room {n2} at {few} o'clock; {person} will take the minutes.",
        "Please send your figures to {person} two days before, so that the report can be printed.",
        "The supplier of {product} has raised its prices by {few} per cent, which we have to discuss.",
        "We also need somebody who looks after the visitors from {town}.",
        "Whoever travels by car should know that the car park behind the building is closed.",
    ),
)
FILLINGS = {
    "town": "Altenbruck|Marvelle|Port Sennen|Hallowfield|Vestermark|Costabella|Grünau|Saint-Aubert|Kirkhaven|Lindholm",
    "river": "Arle|Morva|Teld|Saane|Brint|Lune|Oskar|Wend",
    "trade": "salt|wool|timber|glass|fish|copper|linen",
    "product": "garden tools|hearing aids|bicycle lamps|coffee machines|water pumps|wooden toys|sails|thermometers",
    "month": "January|March|April|June|August|September|October|December",
    "person": "Helene Moreau|Tomas Lindqvist|Amira Haddad|Georg Brandl|Lucia Ferrante|Patrick O'Dea"
    "|Yuki Tanabe|Ewa Nowak",
    "company": "Brandl and Sons|Nordlicht|Ferrante Tools|Lumen Works|Bluewater|Oakline",
    "animal": "bats|hedgehogs|otters|storks|toads|lynxes|swifts",
}
