"""What the prompts that ship ask, with names of words (prompt_words.py) in place of the words."""

from __future__ import annotations

STYLES = (
    "",
    "",
    "",
    " Answer in two or three sentences.",
    " Keep it short.",
    " Give an example.",
    " Use simple words.",
    " Answer as a numbered list.",
    " Be as precise as you can.",
    " I am a complete beginner.",
    " Explain your reasoning.",
    " Mention one common mistake.",
)
LENGTHS = ("", "", " Keep it under 100 words.", " Write about 150 words.", " Make it funny.", " Use a calm tone.")
WORKINGS = ("", "", " Show your steps.", " Think step by step.", " Give only the calculation and the result.")
CODE_STYLES = (
    "",
    "",
    " Add comments.",
    " Explain how it works.",
    " Include a short example of its use.",
    " Add tests.",
)

QUESTIONS = (
    "What is the most important thing to know about {subject}?",
    "Why should anybody care about {subject}?",
    "What are three interesting facts about {subject}?",
    "What do people often get wrong about {subject}?",
    "Who would be a good person to ask about {subject}, and what should I ask?",
    "How has our understanding of {subject} changed over time?",
    "What connects {subject} and {other}?",
    "Which is easier to learn about, {subject} or {other}?",
    "Where can I see {subject} in everyday life?",
    "If I had only ten minutes for {subject}, what should I read about?",
    "What are the advantages and disadvantages of knowing a lot about {subject}?",
    "What would the world be like without {subject}?",
)
EXPLANATIONS = (
    "Explain {subject}.",
    "Explain {subject} to a ten-year-old.",
    "Can you explain {subject} with an analogy?",
    "I have to give a talk about {subject}. What are the key points?",
    "Describe {subject} for an encyclopedia.",
    "Please tell me how {subject} works or came about.",
    "Give me a short introduction to {subject}.",
    "Write a quiz of three questions about {subject}, with answers.",
    "List the main terms one needs to talk about {subject} and define each.",
    "Summarize what is known about {subject}.",
)
HOW_TO = (
    "How do I {task}?",
    "What is the best way to {task}?",
    "Give me step-by-step instructions to {task}.",
    "I want to {task}, but I don't know where to start. Can you help?",
    "What do I need in order to {task}?",
    "Write a checklist for somebody who wants to {task}.",
    "What should I avoid when I {task}?",
    "How long does it take to {task}, and what does it cost?",
    "My friend tried to {task} and failed. What may have gone wrong?",
)
WRITING = (
    "Write a short story about {person} in {place} who {event}.",
    "Write the opening paragraph of a novel set in {place}.",
    "Write a poem about {subject}.",
    "Write a haiku about {subject} and one about {place}.",
    "Write a dialogue between {person} and {name} in {place}.",
    "Write a blog post about why everyone should learn to {task}.",
    "Write an e-mail to {name} to say that I cannot come because I have to {task}.",
    "Write a polite e-mail in which I ask {name} for help: I want to {task}.",
    "Write a thank-you note to {person}.",
    "Write a product description for a device that helps people {task}.",
    "Write a review of a documentary about {subject}.",
    "Write a speech about {subject} for a school assembly.",
    "Write a letter from {person} to {name}, sent from {place}.",
    "Write a newspaper article about {person} who {event} in {place}.",
    "Suggest five titles for a book about {subject}.",
    "Write an essay that compares {subject} with {person} who {event}.",
    "Describe {place} so that the reader can smell and hear it.",
    "Write a song text about {person} who {event}.",
)
ROLE_PLAY = (
    "Imagine you are {role}. {question}",
    "Pretend to be {role} and answer me: {question}",
    "You are {role}. Stay in character. {question}",
    "Let's play a game: you are {role}, I am your visitor. {question}",
    "Speak like {role}. {question}",
)
REASONING = (
    "{a} is older than {b}, and {b} is older than {c}. Who is the youngest? Explain.",
    "{a} stands in front of {b} in a queue, and {c} stands right behind {b}. Who is in the middle?",
    "There are {m} people in {place}. Each shakes hands with every other one once. How many handshakes is that?",
    "{a} has {n} brothers, and each brother has {n} sisters. How many sisters does {a} have? Discuss what is unclear.",
    "If all glimps are blons and {n} blons are red, must any glimp be red? Explain your answer.",
    "A clock in {place} loses {n} minutes every hour. What does it show {m} hours after it was set right at noon?",
    "{a} says that {b} always lies. {b} says that {c} tells the truth. {c} says nothing. Who can be trusted?",
    "Would you rather spend {n} hours reading about {subject} or about {other}? Argue for both sides, then decide.",
    "Something went missing in {place}. {a}, {b} and {c} were there. Which {n} questions would you ask, and why?",
    "Is it fair that {a} gets {m} per cent of the prize when {b} did {n} tenths of the work? Explain.",
    "Find the odd one out and explain: {subject}, {other}, {place}.",
    "What would happen in {place} if there were no electricity for {n} days?",
    "Argue for and against: every school should teach {subject} for {n} hours a week.",
)
ARITHMETIC = (
    "{a} has {m} {goods} and buys {n} boxes with {k} {goods} each. How many {goods} does {a} have now?",
    "A shop sells {goods} at {n} euros each. {a} buys {k} and pays with a note of 200 euros. How much change is there?",
    "{a} reads {n} pages on weekdays and {m} pages on each day of the weekend. How many pages is that in {k} weeks?",
    "A train travels {big} kilometres in {n} hours. How fast is it, and how far does it come in {k} hours?",
    "{a} and {b} share {big} {goods} so that {a} gets twice as many as {b}. How many does each get?",
    "A coat costs {big} euros and is reduced by {percent} per cent. What does it cost now?",
    "{a} earns {m} euros an hour and works {n} hours a day, {k} days. How much does {a} earn?",
    "A recipe for {n} people needs {m} grams of flour per person. How much flour is needed for {big} people?",
    "A tank holds {big} litres. {n} litres flow in and {k} litres flow out every minute. When is it full, if ever?",
    "What is {big} divided by {n}, and what is left over?",
    "Calculate {m} x {n} + {big} - {k}.",
    "{a} is {m} years old. In {n} years {a} will be twice as old as {b}. How old is {b} now?",
    "A garden is {m} metres long and {n} metres wide. How much fence is needed, and how large is the garden?",
    "Of {big} {goods}, {percent} per cent are broken and {n} are lost. How many are left?",
    "Solve for x: {n}x + {m} = {big}.",
)
CODE = (
    "Write a function in {language} that {task}.",
    "Write a {language} program that {task}.",
    "How would you write something in {language} that {task}?",
    "Show me the shortest readable {language} code that {task}.",
    "I am learning {language}. Please show me code that {task}, line by line.",
    "Design a {language} function that {task}. What are its edge cases?",
)
SNIPPET_TASKS = (
    "What does this code do?\n\n```\n{code}\n```",
    "Find the mistake in this code and correct it, if there is one:\n\n```\n{code}\n```",
    "Explain this code line by line:\n\n```\n{code}\n```",
    "Rewrite this code so that it is easier to read:\n\n```\n{code}\n```",
    "Write tests for this code:\n\n```\n{code}\n```",
    "Translate this code into Python, or into JavaScript if it is Python:\n\n```\n{code}\n```",
)
TRANSLATION = (
    "Translate from {source} into {goal}: {sentence}",
    "Translate this sentence into {goal}: {sentence}",
    "How do you say this in {goal}? {sentence}",
    "{sentence}\n\nPlease translate the {source} sentence above into {goal}.",
)
SUMMARIES = (
    "Summarize the following text:\n\n{passage}",
    "Summarize this in one sentence: {passage}",
    "{passage}\n\nGive me the main points of this text as a list.",
    "Shorten this text to about half its length:\n\n{passage}",
    "Write a headline and a short summary for this text:\n\n{passage}",
)
READING = (
    "{passage}\n\nWhat is this text about, and what is its most important statement?",
    "Read this text and answer: what changed, and why?\n\n{passage}",
    "Using only the text below, say who or what is mentioned first and what is said of it.\n\nText: {passage}",
    "Context: {passage}\n\nQuestion: What happens at the end?\nAnswer:",
    "Context: {passage}\n\nQuestion: Which numbers or amounts are named, and what do they stand for?",
    "{passage}\n\nAsk three questions that this text answers, and answer them.",
    "Is the following text neutral? Quote the words that tell.\n\n{passage}",
)
EXTRACTION = (
    "List all names of people and places in this text:\n\n{passage}",
    "Extract the key facts from this text as JSON:\n\n{passage}",
    "Make a table of the dates and events in this text:\n\n{passage}",
    "Which nouns occur most often in this text? {passage}",
    "Give five keywords for this text: {passage}",
)
FOLLOW_UPS = (
    "Can you make that shorter?",
    "Please rewrite your answer in simpler words.",
    "Give me an example of what you mean.",
    "Why is that so?",
    "Rewrite your answer as a list.",
    "What would somebody say who disagrees?",
    "Thanks! What should I do next?",
    "Now write the same for children.",
    "Are you sure? Check your answer and correct it if necessary.",
    "Turn your answer into a short e-mail to a colleague.",
    "Which part of that is most important?",
    "Tell me more about the first point.",
    "Summarize what you just said in one sentence.",
    "Write it again in a more formal tone.",
    "Start every sentence of your answer with the letter A.",
    "Ask me three questions to see whether I have understood it.",
)
